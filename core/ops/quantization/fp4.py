"""Quantisation to 4-bit floating point, ``e2m1``, with the numbers ±0, ½, 1, 1½, 2, 3, 4 and 6.

Adjacent elements of a row share a scale. ``x / (group scale · scale)``, in float32 (float64 for
float64 input), is rounded to the nearest number, ties to the even code, at most 6. There are two
formats:

- NVFP4 (arXiv:2509.25149), with a given scale of the whole tensor: 16 elements have the scale
  ``amax / (6 · scale)`` in ``float8_e4m3fn``, at most 448. If the scale rounds to zero, the group
  becomes zeros.
- MXFP4 (OCP Microscaling Formats 1.0; Rouhani et al., arXiv:2310.10537), without a given scale: 32
  elements have the scale ``2 ** (floor(log2(amax)) - 2)`` in ``float8_e8m0fnu``, at least
  ``2 ** -127``.

A NaN makes the scale of its group NaN, and the group zeros. An infinity saturates. There are no
gradients.
"""

from __future__ import annotations

import torch
from opgraft.binding.functional import register_functional
from opgraft.ops.checks import expect_floating, expect_same_device
from opgraft.ops.precision import compute_dtype
from torch import Tensor

__all__ = ["quant_fp4"]

NV_GROUP = 16
"""Elements of a scale in NVFP4."""
MX_GROUP = 32
"""Elements of a scale in MXFP4."""
FP4_MAX = 6.0
"""The largest number of ``e2m1``."""
GROUP_SCALE_MAX = 448.0
"""The largest scale of a group in NVFP4."""
MAX_EXPONENT = 2
"""The exponent of the largest number of ``e2m1``."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers by their code."""


def group_size(scale: Tensor | None) -> int:
    """Return the number of elements of a group: ``scale`` is for the whole tensor, if given."""
    return MX_GROUP if scale is None else NV_GROUP


def fp4_numbers(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of bytes, ``[..., 2 · bytes]``, the lower bits of a byte first."""
    table = torch.tensor(E2M1, dtype=dtype, device=packed.device)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    return table[codes.int()]


def _fake(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    *lead, hidden = x.shape
    dtype = torch.float8_e8m0fnu if scale is None else torch.float8_e4m3fn
    packed = x.new_empty((*lead, hidden // 2), dtype=torch.uint8)
    group_scales = x.new_empty((*lead, hidden // group_size(scale)), dtype=dtype)
    return packed, group_scales


@register_functional("quant_fp4", _fake, differentiable=False)
def quant_fp4(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantise ``x`` to NVFP4 by a scale of the whole tensor, or without a scale to MXFP4.

    NVFP4 is from arXiv:2509.25149, MXFP4 from arXiv:2310.10537.

    Args:
        x: ``[..., hidden]`` in float32, bfloat16, float16 or float64. ``hidden`` is a multiple of
            16, without ``scale`` of 32.
        scale: one positive number on the device of ``x``. With ``amax(x) / 2688``, the largest
            scale of a group is 448, the most of the format.

    Returns:
        ``[..., hidden / 2]`` in ``uint8``, two numbers to a byte, the first in the lower bits; and
        the scales of groups, ``[..., hidden / 16]`` in ``float8_e4m3fn`` or ``[..., hidden / 32]``
        in ``float8_e8m0fnu``.

    Raises:
        ValueError: the dtype is not supported, groups do not divide ``hidden``, or the scale is
            several numbers or on another device.
    """
    op = "quant_fp4"
    size = group_size(scale)
    expect_floating(op, "x", x)
    if x.dim() == 0 or x.shape[-1] % size:
        made = "MXFP4, as no scale is given" if scale is None else "NVFP4, as a scale is given"
        raise ValueError(
            f"{op}: x has shape {tuple(x.shape)}, expected [..., a multiple of {size}] for {made}"
        )

    dtype = compute_dtype(x.dtype)
    count = x.shape[-1] // size
    groups = x.detach().unflatten(-1, (count, size)).to(dtype)  # type: ignore[no-untyped-call]
    largest = groups.abs().amax(-1)

    if scale is None:
        group_scales = _power_of_two_scale(largest)
        divisors = group_scales.to(dtype)
    else:
        _expect_whole_scale(op, scale, x)
        whole = scale.detach().reshape(()).to(dtype)
        exact = largest / (FP4_MAX * whole)
        group_scales = exact.clamp(max=GROUP_SCALE_MAX).to(torch.float8_e4m3fn)
        divisors = group_scales.to(dtype) * whole

    divisors = divisors.unsqueeze(-1)
    # A small scale may be rounded to zero.
    quotients = torch.where(divisors > 0, groups / divisors, 0.0)
    codes = _fp4_codes(quotients).flatten(-2)
    return codes[..., ::2] | codes[..., 1::2] << 4, group_scales


def _expect_whole_scale(op: str, scale: Tensor, x: Tensor) -> None:
    expect_same_device(op, "scale", scale, "x", x)
    if scale.numel() != 1:
        raise ValueError(f"{op}: scale has shape {tuple(scale.shape)}, expected one element")


def _power_of_two_scale(largest: Tensor) -> Tensor:
    # By the bits, as a logarithm with an error of one unit would halve or double the scale.
    biased_exponents = largest.to(torch.float32).view(torch.int32) >> 23
    exponents = (biased_exponents - MAX_EXPONENT).clamp(min=0)
    # 255 is NaN in e8m0.
    codes = torch.where(largest.isnan(), 255, exponents).to(torch.uint8)
    return codes.view(torch.float8_e8m0fnu)


def _fp4_codes(quotients: Tensor) -> Tensor:
    """Return the codes of the nearest numbers, ties to even.

    Below 2 the numbers are ½ apart, below 4 they are 1 apart, and from 4 on 2. Within each range,
    whole steps have consecutive codes.
    """
    magnitudes = quotients.abs().clamp(max=FP4_MAX)
    # Without a name for each range, so that no more than two ranges take memory at a time.
    above_2 = torch.where(magnitudes < 4, magnitudes.round() + 2, (magnitudes / 2).round() + 4)
    codes = torch.where(magnitudes < 2, (magnitudes * 2).round(), above_2).to(torch.uint8)
    sign = quotients.signbit().to(torch.uint8)
    return codes | sign << 3
