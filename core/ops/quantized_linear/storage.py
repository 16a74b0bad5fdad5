"""The storage of quantized weights: codes with a scale, and perhaps an offset, per group of inputs of an output row.

A weight is ``code · scale + offset``. Eight-bit codes are ``int8``, ``[out_features, in_features]``. Four-bit codes,
from 0 to 15, lie two to a byte in ``uint8``, ``[out_features, 64 · ceil(in_features / 128)]``: a row is cut into blocks
of 128 inputs, the last filled up, and input ``32 k + w`` of a block is in bits ``4 k`` to ``4 k + 3`` of its
little-endian 16-bit word ``w``. So a vector of words that is shifted by four bits holds 32 inputs that adjoin, as pairs
whose products a processor adds up: a kernel needs one shift and one look-up for these. Four-bit codes without offsets
are symmetric: the weight is ``(code - 8) · scale``.

Scales and offsets are ``[out_features, groups]``. The groups of a row have the same size; one group is a scale per
output channel.
"""

from __future__ import annotations

import torch
from opgraft.ops.checks import expect_floating
from torch import Tensor
from torch.nn import functional as F

BLOCK = 128
"""Inputs in a block of four-bit codes."""

WORDS = 32
"""16-bit words in a block."""

MIDDLE = 8
"""The four-bit code of zero where there are no offsets."""


def packed_size(in_features: int) -> int:
    """Return the bytes of a row of four-bit codes."""
    return -(-in_features // BLOCK) * (BLOCK // 2)


def pack_int4(codes: Tensor) -> Tensor:
    """Pack four-bit codes.

    Args:
        codes: ``[..., in_features]``, whole numbers from 0 to 15 in any integer dtype.

    Returns:
        ``[..., 64 · ceil(in_features / 128)]`` in ``uint8``; the last block is filled up with zeros.
    """
    filled = F.pad(codes.to(torch.uint8), (0, -codes.shape[-1] % BLOCK))
    words = filled.reshape(*filled.shape[:-1], filled.shape[-1] // BLOCK, BLOCK // WORDS, WORDS).mT
    return (words[..., ::2] | words[..., 1::2] << 4).flatten(-3)


def unpack_int4(packed: Tensor, in_features: int) -> Tensor:
    """Unpack what ``pack_int4`` has packed.

    Args:
        packed: ``[..., 64 · ceil(in_features / 128)]`` in ``uint8``.
        in_features: of a row.

    Returns:
        ``[..., in_features]`` in ``uint8``, from 0 to 15.
    """
    pairs = packed.reshape(*packed.shape[:-1], packed.shape[-1] * 2 // BLOCK, WORDS, BLOCK // WORDS // 2)
    words = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)
    return words.mT.flatten(-3)[..., :in_features]


def dequantize(
    weight: Tensor, scales: Tensor, offsets: Tensor | None, in_features: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the weight that codes stand for, ``[out_features, in_features]``, computed in ``dtype``."""
    codes = weight if weight.dtype == torch.int8 else unpack_int4(weight, in_features)
    groups = codes.reshape(*scales.shape, in_features // scales.shape[1]).to(dtype)
    if offsets is None and weight.dtype == torch.uint8:
        groups = groups - MIDDLE
    scaled = groups * scales[..., None].to(dtype)
    shifted = scaled if offsets is None else scaled + offsets[..., None].to(dtype)
    return shifted.reshape(scales.shape[0], in_features)


def expect_storage(
    op: str, weight: Tensor, scales: Tensor, offsets: Tensor | None, in_features: int, device: torch.device
) -> None:
    """Raise ``ValueError`` unless these hold a weight of so many inputs, on that device."""
    if weight.dtype not in (torch.int8, torch.uint8):
        raise ValueError(f"{op}: weight is {weight.dtype}, expected torch.int8, or torch.uint8 for four bits")
    width = in_features if weight.dtype == torch.int8 else packed_size(in_features)
    if weight.dim() != 2 or weight.shape[1] != width:
        raise ValueError(
            f"{op}: weight has shape {tuple(weight.shape)}, expected [out_features, {width}] for {in_features} inputs "
            f"in {weight.dtype}"
        )
    expect_floating(op, "scales", scales)
    if scales.dim() != 2 or scales.shape[0] != weight.shape[0] or not scales.shape[1]:
        raise ValueError(f"{op}: scales have shape {tuple(scales.shape)}, expected [{weight.shape[0]}, groups]")
    if in_features % scales.shape[1]:
        raise ValueError(f"{op}: {in_features} inputs cannot be cut into the {scales.shape[1]} groups of the scales")
    named = {"weight": weight, "scales": scales, "offsets": offsets}
    if offsets is not None and (offsets.shape != scales.shape or offsets.dtype != scales.dtype):
        raise ValueError(
            f"{op}: offsets have shape {tuple(offsets.shape)} and dtype {offsets.dtype}, expected those of scales, "
            f"{tuple(scales.shape)} and {scales.dtype}"
        )
    for name, tensor in named.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{op}: {name} is on {tensor.device}, expected {device} as x")
