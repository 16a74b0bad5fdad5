"""Rotary position embeddings."""

from opgraft.ops.rotary.dual_chunk import *
from opgraft.ops.rotary.modules import *
from opgraft.ops.rotary.rope import *
from opgraft.ops.rotary.scaled import *
from opgraft.ops.rotary.variants import *
from opgraft.ops.rotary.vision import *
