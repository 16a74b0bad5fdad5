"""Multi-head latent attention: the cache has one latent and one rotated key per token."""

from opgraft.ops.attention.latent.layers import *
from opgraft.ops.attention.latent.modules import *
from opgraft.ops.attention.latent.wrapper import *
