"""State spaces: mixers that carry a state from token to token."""

from opgraft.ops.state_space import functional as functional
from opgraft.ops.state_space.gated_norm import *
from opgraft.ops.state_space.mamba import *
from opgraft.ops.state_space.mamba2 import *
from opgraft.ops.state_space.modules import *
from opgraft.ops.state_space.plamo2 import *
from opgraft.ops.state_space.short_conv import *
