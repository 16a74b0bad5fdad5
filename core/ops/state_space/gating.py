"""The functional form of the norm of Mamba-2's mixer (arXiv:2405.21060)."""

from __future__ import annotations

from opgraft.binding.functional import register_functional
from opgraft.ops.checks import expect_alike, expect_rows, expect_weight
from opgraft.ops.fakes import like
from opgraft.ops.layernorm.functional import rms_norm_gated
from opgraft.ops.precision import compute_dtype
from torch import Tensor
from torch.nn import functional as F

__all__ = ["mixer2_gated_rms_norm"]


@register_functional("mixer2_gated_rms_norm", like)
def mixer2_gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
) -> Tensor:
    """Gate and normalise by groups, ``rms(x · silu(gate)) · weight`` (arXiv:2405.21060).

    Half types are computed in float32 and rounded once.

    Args:
        x: ``[..., hidden_size]``.
        gate: like ``x``.
        weight: ``[hidden_size]``; without a weight the gate is all, and nothing is normalised.
        eps: added to the mean square.
        group_size: elements of a group with one mean square, a divisor of ``hidden_size``.

    Raises:
        ValueError: ``gate`` or ``weight`` does not fit, or the groups do not divide a row.
    """
    expect_gated(x, gate, weight)
    # With a weight this is rms_norm_gated, so one definition serves both.
    if weight is not None:
        return rms_norm_gated.native(x, weight, gate, eps, group_size)

    dtype = compute_dtype(x.dtype)
    gated = x.to(dtype) * F.silu(gate.to(dtype))
    return gated.to(x.dtype)


def expect_gated(x: Tensor, gate: Tensor, weight: Tensor | None) -> None:
    """Raise ``ValueError`` unless the tensors of ``mixer2_gated_rms_norm`` fit each other."""
    op = "mixer2_gated_rms_norm"
    expect_rows(op, "x", x)
    expect_alike(op, "gate", gate, "x", x)
    if weight is not None:
        expect_weight(op, "weight", weight, x)
