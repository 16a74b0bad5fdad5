"""The storage of quantized weights: codes with a scale, and perhaps an offset, per group of inputs of an output row.

A weight is ``code · scale + offset``. Eight-bit codes are ``int8``, ``[out_features, in_features]``. Four-bit codes,
from 0 to 15, lie two to a byte in ``uint8``, ``[out_features, 64 · ceil(in_features / 128)]``: a row is cut into blocks
of 128 inputs, the last filled up, and input ``32 k + w`` of a block is in bits ``4 k`` to ``4 k + 3`` of its
little-endian 16-bit word ``w``. So a vector of words that is shifted by four bits holds 32 inputs that adjoin, as pairs
whose products a processor adds up: a kernel needs one shift and one look-up for these. Four-bit codes without offsets
are symmetric: the weight is ``(code - 8) · scale``.

Scales and offsets are ``[out_features, groups]``. The groups of a row have the same size; one group is a scale per
output channel.

For processors that add up products of four bytes, codes of either size may lie in tiles of 32 outputs and 32 inputs:
``[out_features / 32, ceil(in_features / 32), bytes]``, the last inputs filled up with zeros. Of a tile's eight-bit
codes, byte ``128 r + 4 o + i`` is input ``4 r + i`` of output ``o``. With four bits the low half of that byte is input
``8 r + i``, and its high half input ``8 r + 4 + i``. Scales and offsets are ``[out_features / 32, groups, 32]`` then.
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

TILE = 32
"""Outputs of a tile of codes, and inputs."""

TOGETHER = 4
"""Inputs of an output that lie side by side in a tile, whose products are added up at once."""

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
    pairs = packed.reshape(
        *packed.shape[:-1], packed.shape[-1] * 2 // BLOCK, WORDS, BLOCK // WORDS // 2
    )
    words = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)
    return words.mT.flatten(-3)[..., :in_features]


def in_tiles(weight: Tensor, in_features: int) -> Tensor:
    """Return the codes of rows, whose number is a multiple of ``TILE``, in tiles."""
    codes = weight if weight.dtype == torch.int8 else unpack_int4(weight, in_features)
    filled = F.pad(codes, (0, -in_features % TILE))
    sizes = filled.shape[0] // TILE, TILE, filled.shape[1] // TILE
    if weight.dtype == torch.int8:
        together = filled.reshape(*sizes, TILE // TOGETHER, TOGETHER)
    else:
        low, high = filled.reshape(*sizes, TILE // TOGETHER // 2, 2, TOGETHER).unbind(-2)
        together = low | high << 4
    return together.permute(0, 2, 3, 1, 4).flatten(2)


def scales_in_tiles(scales: Tensor) -> Tensor:
    """Return scales or offsets of rows, whose number is a multiple of ``TILE``, in tiles."""
    return scales.reshape(scales.shape[0] // TILE, TILE, scales.shape[1]).mT.contiguous()


def rows_of_tiles(tiles: Tensor, in_features: int, rows: Tensor | None = None) -> Tensor:
    """Return the codes of tiles in rows: those of these numbers, or all."""
    together = tiles.reshape(*tiles.shape[:2], tiles.shape[2] // (TILE * TOGETHER), TILE, TOGETHER)
    if rows is None:
        chosen = together.permute(0, 3, 1, 2, 4).flatten(0, 1)
    else:
        chosen = together[rows // TILE, :, :, rows % TILE]
    if tiles.dtype == torch.int8:
        return chosen.flatten(1)[:, :in_features].contiguous()
    return pack_int4(torch.stack((chosen & 15, chosen >> 4), -2).flatten(1)[:, :in_features])


def scales_of_tiles(tiles: Tensor, rows: Tensor | None = None) -> Tensor:
    """Return the scales or offsets of tiles in rows: those of these numbers, or all."""
    return tiles.mT.flatten(0, 1) if rows is None else tiles[rows // TILE, :, rows % TILE]


def out_of_tiles(
    weight: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    in_features: int,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return codes, scales and offsets of tiles in rows: those of these numbers, or all."""
    shifts = None if offsets is None else scales_of_tiles(offsets, rows)
    return rows_of_tiles(weight, in_features, rows), scales_of_tiles(scales, rows), shifts


def dequantize(
    weight: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    in_features: int,
    dtype: torch.dtype = torch.float32,
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
    op: str,
    weight: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    in_features: int,
    device: torch.device,
) -> None:
    """Raise ``ValueError`` unless these hold a weight of so many inputs, on that device."""
    if weight.dtype not in (torch.int8, torch.uint8):
        raise ValueError(
            f"{op}: weight is {weight.dtype}, expected torch.int8, or torch.uint8 for four bits"
        )
    width = in_features if weight.dtype == torch.int8 else packed_size(in_features)
    if weight.dim() != 2 or weight.shape[1] != width:
        raise ValueError(
            f"{op}: weight has shape {tuple(weight.shape)}, expected [out_features, {width}] for {in_features} inputs "
            f"in {weight.dtype}"
        )
    expect_floating(op, "scales", scales)
    if scales.dim() != 2 or scales.shape[0] != weight.shape[0] or not scales.shape[1]:
        raise ValueError(
            f"{op}: scales have shape {tuple(scales.shape)}, expected [{weight.shape[0]}, groups]"
        )
    if in_features % scales.shape[1]:
        raise ValueError(
            f"{op}: {in_features} inputs cannot be cut into the {scales.shape[1]} groups of the scales"
        )
    named = {"weight": weight, "scales": scales, "offsets": offsets}
    if offsets is not None and (offsets.shape != scales.shape or offsets.dtype != scales.dtype):
        raise ValueError(
            f"{op}: offsets have shape {tuple(offsets.shape)} and dtype {offsets.dtype}, expected those of scales, "
            f"{tuple(scales.shape)} and {scales.dtype}"
        )
    for name, tensor in named.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{op}: {name} is on {tensor.device}, expected {device} as x")


def expect_tiles(
    op: str, weight: Tensor, scales: Tensor, offsets: Tensor | None, in_features: int
) -> None:
    """Raise ``ValueError`` unless these are tiles of codes of so many inputs."""
    bits = 8 if weight.dtype == torch.int8 else 4
    size = -(-in_features // TILE), TILE * TILE * bits // 8
    if weight.dtype not in (torch.int8, torch.uint8) or tuple(weight.shape[1:]) != size:
        raise ValueError(
            f"{op}: weight has shape {tuple(weight.shape)} in {weight.dtype}, expected tiles [out_features / {TILE}, "
            f"{size[0]}, {size[1]}] for {in_features} inputs, in torch.int8, or in torch.uint8 for four bits"
        )
    for name, tensor in {"scales": scales, "offsets": offsets}.items():
        if tensor is not None and (
            tensor.dim() != 3 or (len(tensor), tensor.shape[2]) != (len(weight), TILE)
        ):
            raise ValueError(
                f"{op}: {name} have shape {tuple(tensor.shape)}, expected [{len(weight)}, groups, {TILE}] as the "
                "weight is in tiles"
            )
