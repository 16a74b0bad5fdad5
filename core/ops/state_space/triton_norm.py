"""The norm of Mamba-2's mixer by the Triton kernel of gated norms.

``gating`` has the maths and arguments.
"""

from __future__ import annotations

from opgraft.ops.layernorm.triton import rms_norm_gated
from opgraft.ops.state_space import gating as definitions
from opgraft.ops.triton_launch import replaces
from torch import Tensor

__all__ = ["mixer2_gated_rms_norm"]


@replaces(definitions.mixer2_gated_rms_norm)
def mixer2_gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
) -> Tensor:
    # The kernel always normalises.
    if weight is None:
        return definitions.mixer2_gated_rms_norm.native(x, gate)
    definitions.expect_gated(x, gate, weight)
    return rms_norm_gated(x, weight, gate, eps, group_size)
