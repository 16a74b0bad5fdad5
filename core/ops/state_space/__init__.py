"""State spaces: mixers that carry a state from token to token."""

from opgraft.ops.state_space.modules import (
    CausalConv1d,
    CausalConv1dUpdate,
    MambaChunkScan,
    SelectiveScan,
    SelectiveStateUpdate,
)
from opgraft.ops.state_space.short_conv import ShortConv

__all__ = [
    "CausalConv1d",
    "CausalConv1dUpdate",
    "MambaChunkScan",
    "SelectiveScan",
    "SelectiveStateUpdate",
    "ShortConv",
]
