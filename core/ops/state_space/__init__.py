"""State spaces: mixers that carry a state from token to token."""

from opgraft.ops.state_space import functional as functional
from opgraft.ops.state_space.gated_norm import Mixer2RMSNormGated
from opgraft.ops.state_space.mamba import MambaMixer
from opgraft.ops.state_space.mamba2 import MambaMixer2
from opgraft.ops.state_space.modules import (
    CausalConv1d,
    CausalConv1dUpdate,
    MambaChunkScan,
    SelectiveScan,
    SelectiveStateUpdate,
)
from opgraft.ops.state_space.plamo2 import Plamo2MambaMixer
from opgraft.ops.state_space.short_conv import ShortConv

__all__ = [
    "CausalConv1d",
    "CausalConv1dUpdate",
    "MambaChunkScan",
    "MambaMixer",
    "MambaMixer2",
    "Mixer2RMSNormGated",
    "Plamo2MambaMixer",
    "SelectiveScan",
    "SelectiveStateUpdate",
    "ShortConv",
]
