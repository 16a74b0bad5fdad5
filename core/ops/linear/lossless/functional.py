"""Linear layers over bfloat16 weights in 12 bits.

``opgraft.ops.linear.lossless.storage`` describes the storage.
"""

from __future__ import annotations

from opgraft.binding.functional import register_functional
from opgraft.ops.checks import expect_floating, expect_same_device, expect_same_dtype
from opgraft.ops.linear.lossless.storage import expect_lossless, from_12_bits
from torch import Tensor
from torch.nn import functional as F

__all__ = ["lossless_linear"]


def _mapped(x: Tensor, weight: Tensor, *others: object, **settings: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@register_functional("lossless_linear", _mapped)
def lossless_linear(
    x: Tensor,
    weight: Tensor,
    exponents: Tensor,
    places: Tensor,
    units: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute ``x · Wᵀ + bias`` with a bfloat16 weight that is stored in 12 bits, without loss.

    Zhang et al. (arXiv:2504.11651) store weights with fewer bits for the exponents, too. This
    definition makes the plain weight, then computes as ``linear`` does. A kernel returns the bits
    that the same provider's ``linear`` returns over the plain weight.

    Args:
        x: ``[..., in_features]`` in any floating-point dtype.
        weight: codes, ``[out_features, 96 · floor(in_features / 64) + 2 · (in_features mod 64)]``
            in ``uint8``; with the next three tensors from ``to_12_bits``.
        exponents: ``[16]`` in ``uint8``.
        places: ``[count + 1]`` in ``int32``, numbers of units; the last is 2^31 - 1.
        units: ``[count + 1, 64]`` in ``int16``, the bits of bfloat16 numbers.
        bias: ``[out_features]`` in the dtype of ``x``.

    Returns:
        ``[..., out_features]``.

    Raises:
        ValueError: a shape, a dtype or a device does not fit.
    """
    op = "lossless_linear"
    expect_floating(op, "x", x)
    if x.dim() == 0:
        raise ValueError(f"{op}: x has shape (), expected [..., in_features]")

    in_features = x.shape[-1]
    expect_lossless(op, weight, exponents, places, units, in_features, x.device)
    if bias is not None:
        shape = tuple(bias.shape)
        rows = weight.shape[0]
        if shape != (rows,):
            raise ValueError(f"{op}: bias has shape {shape}, expected [{rows}]")
        expect_same_dtype(op, "bias", bias, "x", x)
        expect_same_device(op, "bias", bias, "x", x)

    plain = from_12_bits(weight, exponents, places, units, in_features)
    plain = plain.to(x.dtype)
    return F.linear(x, plain, bias)
