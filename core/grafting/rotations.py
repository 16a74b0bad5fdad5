"""The ways in which rotary functions of models pair elements, and how the op does the same.

A function is recognised by running it on random heads, in each precision. All take query and key ``[batch, heads,
sequence, head_size]``, and cosines and sines ``[batch or 1, sequence, rotary_dim]`` with each number twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from opgraft.grafting.questions import NoQuestions
from opgraft.grafting.traced import once_per_function
from opgraft.ops import ApplyRotaryEmb
from torch import Tensor, nn

Function = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Rotation:
    """The way in which a function rotates heads.

    Attributes:
        interleaved: it pairs even elements with odd ones, as in GPT-J; otherwise the halves, as in GPT-NeoX.
        to_halves: it writes what were even and odd elements as two halves, as in DeepSeek.
        table_in_pairs: the table has each number twice in a row; otherwise its two halves are the same.
        partial: what is behind the elements that the table is for stays as it is.
    """

    interleaved: bool
    to_halves: bool
    table_in_pairs: bool
    partial: bool

    def is_neox_style(self) -> bool:
        """Return the setting of ``ApplyRotaryEmb``."""
        return not self.interleaved or self.to_halves

    def fits(self, x: Tensor, cos: Tensor) -> bool:
        """Return whether there is one row of the table for each token of ``x``, in its dtype."""
        if x.dim() != 4 or cos.dim() != 3 or cos.dtype is not x.dtype:
            return False
        (batch, _, tokens, head_size), (tables, rows, size) = x.shape, cos.shape
        rotated = size % 2 == 0 and (size == head_size or (self.partial and size < head_size))
        return rotated and rows == tokens and tables in (1, batch)

    def takes_all(self, query: Tensor, key: Tensor, cos: Tensor) -> bool:
        """Return whether all of each head is rotated by one table in two halves; query, key and table fit."""
        if self.to_halves or self.table_in_pairs:
            return False
        tables, _, size = cos.shape
        return tables == 1 and query.shape[3] == key.shape[3] == size

    def repeats(self, table: Tensor) -> bool:
        """Return whether a table has each number twice, where this rotation expects it."""
        half = table.shape[-1] // 2
        halves = table[..., :half], table[..., half:]
        first, second = (table[..., ::2], table[..., 1::2]) if self.table_in_pairs else halves
        return not table.is_meta and torch.equal(first, second)

    def apply(self, op: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate heads by ``op``; the arguments fit."""
        size, half = cos.shape[-1], cos.shape[-1] // 2
        cos, sin = (
            table[..., ::2] if self.table_in_pairs else table[..., :half] for table in (cos, sin)
        )
        rotated, rest = x[..., :size], x[..., size:]
        if self.to_halves:
            rotated = torch.cat((rotated[..., ::2], rotated[..., 1::2]), dim=-1)
        rotated = _by_token(op, rotated, cos, sin)
        return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


_FULL = [
    Rotation(interleaved, to_halves, in_pairs, False)
    for interleaved, to_halves, in_pairs in product((False, True), repeat=3)
    if interleaved or not (to_halves or in_pairs)
]


@once_per_function
def rotation_of(function: Function) -> Rotation | None:
    """Find the way in which a function rotates heads, ``None`` if it is none of those known."""
    for rotation in _FULL:
        if _computes(function, rotation, 8):
            partial = Rotation(
                rotation.interleaved, rotation.to_halves, rotation.table_in_pairs, True
            )
            return partial if _computes(function, partial, 12) else rotation
    return None


def _by_token(op: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    tokens = x.transpose(1, 2)
    if cos.shape[0] == 1:
        turned: Tensor = op(tokens, cos[0], sin[0])
    else:  # each row has positions of its own
        turned = op(tokens.flatten(0, 1), cos.flatten(0, 1), sin.flatten(0, 1)).view(tokens.shape)
    return turned.transpose(1, 2)


_TRIALS = (
    (torch.float32, 2, 2, 5),
    (torch.float32, 2, 1, 5),
    (torch.bfloat16, 2, 2, 5),
    (torch.float16, 2, 2, 5),
    (torch.float64, 2, 2, 5),
    (torch.float32, 1, 1, 1),
    (torch.float32, 2, 2, 4097),
)
"""Dtype, rows of the heads and of the tables, and tokens: functions might branch on each, or drop what is single."""


def _computes(function: Function, rotation: Rotation, head_size: int) -> bool:
    """Return whether a function computes on random heads, with tables for 8 elements, what the op computes."""
    generator = torch.Generator().manual_seed(0)
    op = _Native(rotation.is_neox_style())
    for dtype, rows, batch, tokens in _TRIALS:
        random = functools.partial(
            torch.randn, dtype=torch.float32, device="cpu", generator=generator
        )
        query, key = (random(rows, n, tokens, head_size) for n in (4, 2))
        angles = random(batch, tokens, 4)
        angles = (
            angles.repeat_interleave(2, -1) if rotation.table_in_pairs else angles.repeat(1, 1, 2)
        )
        query, key, cos, sin = (t.to(dtype) for t in (query, key, angles.cos(), angles.sin()))
        try:
            with NoQuestions():
                found = function(query, key, cos, sin)
            wanted = [rotation.apply(op, x, cos, sin) for x in (query, key)]
        except Exception:  # whatever a function of another kind raises
            return False
        tolerance = 0.1 if dtype in (torch.bfloat16, torch.float16) else 1e-5
        if len(found) != 2 or not all(
            _agree(a, b, tolerance) for a, b in zip(found, wanted, strict=True)
        ):
            return False
    return True


class _Native(nn.Module):
    """The definition, whatever kernels are bound here."""

    def __init__(self, is_neox_style: bool) -> None:
        super().__init__()
        self.is_neox_style = is_neox_style

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return ApplyRotaryEmb.forward_native(
            ApplyRotaryEmb(is_neox_style=self.is_neox_style), x, cos, sin
        )


def _agree(found: Any, wanted: Tensor, tolerance: float) -> bool:
    alike = isinstance(found, Tensor) and (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    return alike and bool(torch.allclose(found, wanted, atol=tolerance, rtol=tolerance))
