"""The functional forms of state spaces, in one place."""

from opgraft.ops.state_space.causal_conv import causal_conv1d, causal_conv1d_update
from opgraft.ops.state_space.chunk_scan import mamba_chunk_scan
from opgraft.ops.state_space.gating import mixer2_gated_rms_norm
from opgraft.ops.state_space.selective_scan import selective_scan, selective_state_update

__all__ = [
    "causal_conv1d",
    "causal_conv1d_update",
    "mamba_chunk_scan",
    "mixer2_gated_rms_norm",
    "selective_scan",
    "selective_state_update",
]
