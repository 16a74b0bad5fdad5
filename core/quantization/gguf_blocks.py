"""Blocks of GGUF files, as codes with scales and offsets: nothing is rounded.

The layouts are those of ``ggml-common.h`` of llama.cpp. Scales keep their 16 bits. Scales of the K
types are products of two numbers in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from opgraft.quantization.codes import Codes
from torch import Tensor

HALF = 2
"""Bytes of a float16 number."""


@dataclass(frozen=True)
class BlockFormat:
    """A type of blocks.

    Attributes:
        values: numbers of a block.
        size: bytes of a block.
        read: maps bytes ``[rows, blocks, size]`` to the codes of the rows.
    """

    values: int
    size: int
    read: Callable[[Tensor], Codes]

    def codes(self, rows: Tensor) -> Codes:
        """Return the codes in the bytes ``[rows, bytes of a row]``."""
        return self.read(rows.reshape(rows.shape[0], -1, self.size))


def _half(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 number at a byte of each block, ``[rows, blocks]``."""
    return blocks[..., start : start + HALF].contiguous().view(torch.float16)[..., 0]


def _nibbles(data: Tensor, width: int) -> Tensor:
    """Return four-bit numbers: the low halves of ``width`` bytes, then the high halves."""
    words = data.reshape(*data.shape[:-1], -1, width)
    return torch.stack((words & 15, words >> 4), -2).flatten(-3)


def _fifth_bits(data: Tensor) -> Tensor:
    """Return bit ``i`` of four bytes as the fifth bit of number ``i``."""
    places = torch.arange(8, dtype=torch.uint8)
    bits = data[..., None] >> places & 1
    return bits.flatten(-2) << 4


def _q4_0(blocks: Tensor) -> Codes:
    codes = _nibbles(blocks[..., 2:], 16)
    return Codes(codes.flatten(1), _half(blocks, 0))


def _q4_1(blocks: Tensor) -> Codes:
    codes = _nibbles(blocks[..., 4:], 16)
    return Codes(codes.flatten(1), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Tensor) -> Codes:
    numbers = _nibbles(blocks[..., 6:], 16) | _fifth_bits(blocks[..., 2:6])
    codes = numbers.to(torch.int8) - 16
    return Codes(codes.flatten(1), _half(blocks, 0))


def _q5_1(blocks: Tensor) -> Codes:
    numbers = _nibbles(blocks[..., 8:], 16) | _fifth_bits(blocks[..., 4:8])
    codes = numbers.to(torch.int8)
    return Codes(codes.flatten(1), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Tensor) -> Codes:
    codes = blocks[..., 2:].contiguous().view(torch.int8)
    return Codes(codes.flatten(1), _half(blocks, 0))


def _scales_of_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and offsets of a block's eight groups, from 12 bytes of six-bit numbers.

    The first four groups have whole bytes. The last four have four bits in the last bytes, and two
    in the high bits of the first bytes.
    """
    packed = blocks[..., 4:16]
    thirds = packed.reshape(*blocks.shape[:-1], 3, 4)
    low, high, rest = thirds.unbind(-2)
    last_scales = (rest & 15) | (low >> 2 & 48)
    last_offsets = (rest >> 4) | (high >> 2 & 48)
    scales = torch.cat((low & 63, last_scales), -1)
    offsets = torch.cat((high & 63, last_offsets), -1)
    scale_of_block = _half(blocks, 0)[..., None].float()
    offset_of_block = _half(blocks, 2)[..., None].float()
    wide_scales = scale_of_block * scales.float()
    # The format takes away what it calls the minimum.
    minima = offset_of_block * offsets.float()
    wide_offsets = -minima
    return wide_scales.flatten(1), wide_offsets.flatten(1)


def _q4_k(blocks: Tensor) -> Codes:
    codes = _nibbles(blocks[..., 16:], 32)
    scales, offsets = _scales_of_k(blocks)
    return Codes(codes.flatten(1), scales, offsets)


def _q5_k(blocks: Tensor) -> Codes:
    # Bit i of byte j is the fifth bit of number j in group i.
    places = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = blocks[..., None, 16:48] >> places & 1
    low = _nibbles(blocks[..., 48:], 32)
    codes = low | fifth.flatten(-2) << 4
    scales, offsets = _scales_of_k(blocks)
    return Codes(codes.to(torch.int8).flatten(1), scales, offsets)


def _q6_k(blocks: Tensor) -> Codes:
    # A byte has the two high bits of four numbers, which lie 32 apart.
    shifts = torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8)
    high_bytes = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 1, 32)
    high = high_bytes >> shifts & 3
    low = _nibbles(blocks[..., :128], 64)
    numbers = low | high.flatten(-3) << 4
    codes = numbers.to(torch.int8) - 32
    scale_of_block = _half(blocks, 208)[..., None].float()
    scales_of_groups = blocks[..., 192:208].contiguous().view(torch.int8).float()
    scales = scale_of_block * scales_of_groups
    return Codes(codes.flatten(1), scales.flatten(1))


FORMATS: Mapping[str, BlockFormat] = MappingProxyType(
    {
        "Q4_0": BlockFormat(32, 18, _q4_0),
        "Q4_1": BlockFormat(32, 20, _q4_1),
        "Q5_0": BlockFormat(32, 22, _q5_0),
        "Q5_1": BlockFormat(32, 24, _q5_1),
        "Q8_0": BlockFormat(32, 34, _q8_0),
        "Q4_K": BlockFormat(256, 144, _q4_k),
        "Q5_K": BlockFormat(256, 176, _q5_k),
        "Q6_K": BlockFormat(256, 210, _q6_k),
    }
)
"""Types for layers, by name in GGUF."""
