"""The storage of quantized weights: codes, with a scale and perhaps an offset per group of inputs.

A weight is ``code · scale + offset``. Each row of outputs has groups of equal size, so scales and
offsets are ``[out_features, groups]``. With one group there is a scale per output channel.

Eight-bit codes are ``int8``, ``[out_features, in_features]``.

Four-bit codes, from 0 to 15, are packed in ``uint8``,
``[out_features, 64 · ceil(in_features / 128)]``. A row is cut into blocks of 128 inputs, the last
block filled up. Input ``32 k + w`` of a block has the bits ``4 k`` to ``4 k + 3`` of the
little-endian 16-bit word ``w``. So a vector of words, shifted by four bits, holds 32 adjacent
inputs as pairs, and processors sum the products of pairs. Without offsets, four-bit codes are
symmetric: the weight is ``(code - 8) · scale``.

Codes of either size may lie in tiles, for processors with sums of four products. A tile holds 32
outputs and 32 inputs: ``[out_features / 32, ceil(in_features / 32), bytes]``, the last inputs
filled up with zeros. With eight bits, byte ``128 r + 4 o + i`` of a tile is input ``4 r + i`` of
output ``o``. With four bits, the low half of that byte is input ``8 r + i``, the high half input
``8 r + 4 + i``. Scales and offsets of tiles are ``[out_features / 32, groups, 32]``.
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
"""The number of outputs of a tile of codes, and of inputs."""

TOGETHER = 4
"""Adjacent inputs of an output in a tile, for one sum of products."""

MIDDLE = 8
"""The four-bit code of zero without offsets."""


def packed_size(in_features: int) -> int:
    """Return the bytes of a row of four-bit codes."""
    return -(-in_features // BLOCK) * (BLOCK // 2)


def pack_int4(codes: Tensor) -> Tensor:
    """Pack four-bit codes.

    Args:
        codes: ``[..., in_features]``, whole numbers from 0 to 15 in any integer dtype.

    Returns:
        ``[..., 64 · ceil(in_features / 128)]`` in ``uint8``; zeros fill up the last block.
    """
    filled = F.pad(codes.to(torch.uint8), (0, -codes.shape[-1] % BLOCK))
    blocks = filled.shape[-1] // BLOCK
    nibbles = BLOCK // WORDS

    words = filled.reshape(*filled.shape[:-1], blocks, nibbles, WORDS).mT
    low = words[..., ::2]
    high = words[..., 1::2]
    return (low | high << 4).flatten(-3)


def unpack_int4(packed: Tensor, in_features: int) -> Tensor:
    """Return the codes before ``pack_int4``.

    Args:
        packed: ``[..., 64 · ceil(in_features / 128)]`` in ``uint8``.
        in_features: of a row.

    Returns:
        ``[..., in_features]`` in ``uint8``, from 0 to 15.
    """
    blocks = packed.shape[-1] * 2 // BLOCK
    bytes_of_word = BLOCK // WORDS // 2
    pairs = packed.reshape(*packed.shape[:-1], blocks, WORDS, bytes_of_word)
    words = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)
    return words.mT.flatten(-3)[..., :in_features]


def in_tiles(weight: Tensor, in_features: int) -> Tensor:
    """Return the codes of rows in tiles. ``TILE`` must divide the number of rows."""
    is_int8 = weight.dtype == torch.int8
    codes = weight if is_int8 else unpack_int4(weight, in_features)

    filled = F.pad(codes, (0, -in_features % TILE))
    sizes = (filled.shape[0] // TILE, TILE, filled.shape[1] // TILE)
    if is_int8:
        tiles = filled.reshape(*sizes, TILE // TOGETHER, TOGETHER)
    else:
        pairs = filled.reshape(*sizes, TILE // TOGETHER // 2, 2, TOGETHER)
        low, high = pairs.unbind(-2)
        tiles = low | high << 4
    # From [rows, output, columns, …] to [rows, columns, …, output, …].
    return tiles.permute(0, 2, 3, 1, 4).flatten(2)


def scales_in_tiles(scales: Tensor) -> Tensor:
    """Return scales or offsets of rows in tiles. ``TILE`` must divide the number of rows."""
    rows, groups = scales.shape
    return scales.reshape(rows // TILE, TILE, groups).mT.contiguous()


def rows_of_tiles(tiles: Tensor, in_features: int, rows: Tensor | None = None) -> Tensor:
    """Return the codes of tiles in rows: the given rows, or all."""
    down, across, size = tiles.shape
    by_output = tiles.reshape(down, across, size // (TILE * TOGETHER), TILE, TOGETHER)
    if rows is None:
        chosen = by_output.permute(0, 3, 1, 2, 4).flatten(0, 1)
    else:
        chosen = by_output[rows // TILE, :, :, rows % TILE]

    if tiles.dtype == torch.int8:
        return chosen.flatten(1)[:, :in_features].contiguous()
    codes = torch.stack((chosen & 15, chosen >> 4), -2).flatten(1)
    return pack_int4(codes[:, :in_features])


def scales_of_tiles(tiles: Tensor, rows: Tensor | None = None) -> Tensor:
    """Return the scales or offsets of tiles in rows: the given rows, or all."""
    if rows is None:
        return tiles.mT.flatten(0, 1)
    return tiles[rows // TILE, :, rows % TILE]


def out_of_tiles(
    weight: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    in_features: int,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return codes, scales and offsets of tiles in rows: the given rows, or all."""
    row_codes = rows_of_tiles(weight, in_features, rows)
    row_scales = scales_of_tiles(scales, rows)
    row_offsets = None if offsets is None else scales_of_tiles(offsets, rows)
    return row_codes, row_scales, row_offsets


def dequantize(
    weight: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    in_features: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the plain weight, ``[out_features, in_features]``, computed in ``dtype``."""
    rows, count = scales.shape
    codes = weight if weight.dtype == torch.int8 else unpack_int4(weight, in_features)
    groups = codes.reshape(rows, count, in_features // count).to(dtype)

    # Without offsets, zero is in the middle of the four-bit codes.
    if offsets is None and weight.dtype == torch.uint8:
        groups = groups - MIDDLE
    scaled = groups * scales[..., None].to(dtype)
    if offsets is not None:
        scaled = scaled + offsets[..., None].to(dtype)
    return scaled.reshape(rows, in_features)


def expect_storage(
    op: str,
    weight: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    in_features: int,
    device: torch.device,
) -> None:
    """Raise ``ValueError`` unless the tensors hold a weight for ``in_features`` on ``device``."""
    if weight.dtype not in (torch.int8, torch.uint8):
        raise ValueError(
            f"{op}: weight is {weight.dtype}, expected torch.int8, or torch.uint8 for four bits"
        )

    width = in_features if weight.dtype == torch.int8 else packed_size(in_features)
    if weight.dim() != 2 or weight.shape[1] != width:
        raise ValueError(
            f"{op}: weight has shape {tuple(weight.shape)}, expected [out_features, {width}] for "
            f"{in_features} inputs in {weight.dtype}"
        )

    expect_floating(op, "scales", scales)
    rows = weight.shape[0]
    if scales.dim() != 2 or scales.shape[0] != rows or not scales.shape[1]:
        raise ValueError(
            f"{op}: scales have shape {tuple(scales.shape)}, expected [{rows}, groups]"
        )

    groups = scales.shape[1]
    if in_features % groups:
        raise ValueError(
            f"{op}: {in_features} inputs cannot be cut into the {groups} groups of the scales"
        )

    if offsets is not None:
        _expect_offsets(op, offsets, scales)
    for name, tensor in {"weight": weight, "scales": scales, "offsets": offsets}.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{op}: {name} is on {tensor.device}, expected {device} as x")


def _expect_offsets(op: str, offsets: Tensor, scales: Tensor) -> None:
    if offsets.shape != scales.shape or offsets.dtype != scales.dtype:
        raise ValueError(
            f"{op}: offsets have shape {tuple(offsets.shape)} and dtype {offsets.dtype}, expected "
            f"those of scales, {tuple(scales.shape)} and {scales.dtype}"
        )


def expect_tiles(
    op: str, weight: Tensor, scales: Tensor, offsets: Tensor | None, in_features: int
) -> None:
    """Raise ``ValueError`` unless the tensors are tiles of codes for ``in_features``."""
    bits = 8 if weight.dtype == torch.int8 else 4
    across = -(-in_features // TILE)
    size = TILE * TILE * bits // 8
    is_known = weight.dtype in (torch.int8, torch.uint8)
    if not is_known or tuple(weight.shape[1:]) != (across, size):
        raise ValueError(
            f"{op}: weight has shape {tuple(weight.shape)} in {weight.dtype}, expected tiles "
            f"[out_features / {TILE}, {across}, {size}] for {in_features} inputs, in torch.int8, "
            "or in torch.uint8 for four bits"
        )

    down = len(weight)
    for name, tensor in {"scales": scales, "offsets": offsets}.items():
        if tensor is None:
            continue
        if tensor.dim() != 3 or (tensor.shape[0], tensor.shape[2]) != (down, TILE):
            raise ValueError(
                f"{op}: {name} have shape {tuple(tensor.shape)}, expected [{down}, groups, "
                f"{TILE}] as the weight is in tiles"
            )
