"""Quantisation to 4-bit floating point, ``e2m1``, whose numbers are ±0, ½, 1, 1½, 2, 3, 4 and 6.

Elements that lie next to each other in a row share a scale. Of ``x / (group scale · scale)``, in float32 (float64 for
float64 input), the nearest number is taken, ties to the even code, at most 6. Two formats differ in their groups:

- NVFP4 (arXiv:2509.25149), where a scale of the whole tensor is given: 16 elements, whose scale is
  ``amax / (6 · scale)`` in ``float8_e4m3fn``, at most 448. A group whose scale is rounded to zero is zeros.
- MXFP4 (OCP Microscaling Formats 1.0; Rouhani et al., arXiv:2310.10537), where none is: 32 elements, whose scale is
  ``2 ** (floor(log2(amax)) - 2)`` in ``float8_e8m0fnu``, at least ``2 ** -127``.

A NaN makes the scale of its group NaN and the group zeros; an infinity saturates. No gradients.
"""

from __future__ import annotations

import torch
from opgraft.binding.functional import register_functional
from opgraft.ops.checks import expect_floating, expect_same_device
from opgraft.ops.precision import compute_dtype
from torch import Tensor

__all__ = ["quant_fp4"]

NV_GROUP = 16
"""Elements that share a scale in NVFP4."""
MX_GROUP = 32
"""Elements that share a scale in MXFP4."""
FP4_MAX = 6.0
"""The largest number of ``e2m1``."""
GROUP_SCALE_MAX = 448.0
"""The largest scale of a group in NVFP4."""
MAX_EXPONENT = 2
"""The exponent of the largest number of ``e2m1``."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers by their code."""


def group_size(scale: Tensor | None) -> int:
    """Return how many elements share a scale, with or without one of the whole tensor."""
    return MX_GROUP if scale is None else NV_GROUP


def fp4_numbers(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers that bytes stand for, ``[..., 2 · bytes]``; the first of a byte is that of its lower bits."""
    table = torch.tensor(E2M1, dtype=dtype, device=packed.device)
    return table[torch.stack((packed & 15, packed >> 4), -1).flatten(-2).int()]


def _fake(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    *lead, hidden = x.shape
    of_groups = torch.float8_e8m0fnu if scale is None else torch.float8_e4m3fn
    groups = x.new_empty((*lead, hidden // group_size(scale)), dtype=of_groups)
    return x.new_empty((*lead, hidden // 2), dtype=torch.uint8), groups


@register_functional("quant_fp4", _fake, differentiable=False)
def quant_fp4(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantise ``x`` to NVFP4 by a scale of the whole tensor (arXiv:2509.25149), or to MXFP4 without one
    (arXiv:2310.10537).

    Args:
        x: ``[..., hidden]`` in float32, bfloat16, float16 or float64, ``hidden`` a multiple of 16, or of 32 without a
            scale.
        scale: one positive number on the device of ``x``, as ``amax(x) / 2688``, with which the largest scale of a
            group is the largest that there is.

    Returns:
        ``[..., hidden / 2]`` in ``uint8``, two numbers to a byte, the first in the lower bits; and the scales of
        groups, ``[..., hidden / 16]`` in ``float8_e4m3fn`` or ``[..., hidden / 32]`` in ``float8_e8m0fnu``.

    Raises:
        ValueError: a dtype that is not supported, a ``hidden`` that groups do not divide, or a scale that is not one
            number or on another device.
    """
    size = group_size(scale)
    expect_floating("quant_fp4", "x", x)
    if x.dim() == 0 or x.shape[-1] % size:
        made = "MXFP4, as no scale is given" if scale is None else "NVFP4, as a scale is given"
        raise ValueError(
            f"quant_fp4: x has shape {tuple(x.shape)}, expected [..., a multiple of {size}] for {made}"
        )
    groups = (
        x.detach()
        .unflatten(-1, (x.shape[-1] // size, size))  # type: ignore[no-untyped-call]
        .to(compute_dtype(x.dtype))
    )
    largest = groups.abs().amax(-1)
    if scale is None:
        group_scales = _power_of_two_scale(largest)
        divisors = group_scales.to(groups.dtype)
    else:
        expect_same_device("quant_fp4", "scale", scale, "x", x)
        if scale.numel() != 1:
            raise ValueError(
                f"quant_fp4: scale has shape {tuple(scale.shape)}, expected one element"
            )
        whole = scale.detach().reshape(()).to(groups.dtype)
        group_scales = (
            (largest / (FP4_MAX * whole)).clamp(max=GROUP_SCALE_MAX).to(torch.float8_e4m3fn)
        )
        divisors = group_scales.to(groups.dtype) * whole
    divisors = divisors.unsqueeze(-1)
    codes = _fp4_codes(torch.where(divisors > 0, groups / divisors, 0.0)).flatten(-2)
    return codes[..., ::2] | codes[..., 1::2] << 4, group_scales


def _power_of_two_scale(largest: Tensor) -> Tensor:
    # The exponent is read from the bits: a logarithm that is off by one unit would halve or double the scale.
    exponents = ((largest.to(torch.float32).view(torch.int32) >> 23) - MAX_EXPONENT).clamp(min=0)
    return torch.where(largest.isnan(), 255, exponents).to(torch.uint8).view(torch.float8_e8m0fnu)


def _fp4_codes(quotients: Tensor) -> Tensor:
    """Return the code of the nearest number: each range of equal steps is rounded to whole steps, ties to even."""
    magnitudes = quotients.abs().clamp(max=FP4_MAX)
    large = torch.where(magnitudes < 4, magnitudes.round() + 2, (magnitudes / 2).round() + 4)
    codes = torch.where(magnitudes < 2, (magnitudes * 2).round(), large).to(torch.uint8)
    return codes | quotients.signbit().to(torch.uint8) << 3
