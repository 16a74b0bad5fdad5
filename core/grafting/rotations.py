"""The ways of rotary functions to pair elements, each as a call of the op.

A function is recognised by trials on random heads, in each precision. All functions take query and
key ``[batch, heads, sequence, head_size]``, and cosines and sines ``[batch or 1, sequence,
rotary_dim]`` with each number twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import torch
from opgraft.grafting.questions import NoQuestions
from opgraft.grafting.traced import once_per_function
from opgraft.ops import ApplyRotaryEmb
from torch import Tensor, nn

Function = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Rotation:
    """The way of a function to rotate heads.

    Attributes:
        interleaved: even elements pair with odd elements, as in GPT-J; otherwise the two halves
            pair, as in GPT-NeoX.
        to_halves: even and odd elements become two halves of the result, as in DeepSeek.
        table_in_pairs: the table has each number twice in a row; otherwise both halves are the
            same.
        partial: elements behind the width of the table stay unchanged.
    """

    interleaved: bool
    to_halves: bool
    table_in_pairs: bool
    partial: bool

    def is_neox_style(self) -> bool:
        """Return the setting of ``ApplyRotaryEmb``."""
        return not self.interleaved or self.to_halves

    def fits(self, x: Tensor, cos: Tensor) -> bool:
        """Return True if the table has one row for each token of ``x``, in the dtype of ``x``."""
        if x.dim() != 4 or cos.dim() != 3 or cos.dtype is not x.dtype:
            return False
        batch, _, tokens, head_size = x.shape
        tables, rows, size = cos.shape
        if size % 2 or rows != tokens or tables not in (1, batch):
            return False
        return size == head_size or (self.partial and size < head_size)

    def takes_all(self, query: Tensor, key: Tensor, cos: Tensor) -> bool:
        """Return True if one table rotates all of each head in two halves; the arguments fit."""
        if self.to_halves or self.table_in_pairs:
            return False
        tables, _, size = cos.shape
        return tables == 1 and query.shape[3] == key.shape[3] == size

    def repeats(self, table: Tensor) -> bool:
        """Return True if a table has each number twice, at the places of this rotation."""
        if table.is_meta:
            return False
        half = table.shape[-1] // 2
        first, second = table[..., :half], table[..., half:]
        if self.table_in_pairs:
            first, second = table[..., ::2], table[..., 1::2]
        return torch.equal(first, second)

    def apply(self, op: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate heads by ``op``; the arguments fit."""
        size = cos.shape[-1]
        rotated = x[..., :size]
        rest = x[..., size:]
        # The op pairs the halves, so the pairs of the function become halves first.
        if self.to_halves:
            rotated = torch.cat((rotated[..., ::2], rotated[..., 1::2]), dim=-1)
        rotated = _by_token(op, rotated, self._once(cos), self._once(sin))
        return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated

    def twice(self, table: Tensor) -> Tensor:
        """Return each number of a table twice, at the places of this rotation."""
        if self.table_in_pairs:
            return table.repeat_interleave(2, -1)
        return table.repeat(1, 1, 2)

    def _once(self, table: Tensor) -> Tensor:
        """Return each number of a table once, as the op takes a table."""
        if self.table_in_pairs:
            return table[..., ::2]
        return table[..., : table.shape[-1] // 2]


_FULL = [
    Rotation(interleaved, to_halves, in_pairs, partial=False)
    for interleaved, to_halves, in_pairs in product((False, True), repeat=3)
    if interleaved or not (to_halves or in_pairs)
]


@once_per_function
def rotation_of(function: Function) -> Rotation | None:
    """Return the way of a function to rotate heads; ``None`` for an unknown one."""
    for rotation in _FULL:
        # Tables for 8 elements rotate all of a head of 8, and a part of a head of 12.
        if _computes(function, rotation, 8):
            partial = replace(rotation, partial=True)
            return partial if _computes(function, partial, 12) else rotation
    return None


def _by_token(op: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    tokens = x.transpose(1, 2)
    turned: Tensor
    if cos.shape[0] == 1:
        turned = op(tokens, cos[0], sin[0])
    else:
        # Each row has positions of its own, so rows become tokens of one row.
        turned = op(tokens.flatten(0, 1), cos.flatten(0, 1), sin.flatten(0, 1))
        turned = turned.view(tokens.shape)
    return turned.transpose(1, 2)


class _Trial(NamedTuple):
    """One call with random heads.

    A function might branch on a dtype, on a single row, table or token, or on many tokens.
    """

    dtype: torch.dtype
    rows: int = 2
    tables: int = 2
    tokens: int = 5

    def tolerance(self) -> float:
        return 0.1 if self.dtype in (torch.bfloat16, torch.float16) else 1e-5


_TRIALS = (
    _Trial(torch.float32),
    _Trial(torch.float32, tables=1),
    _Trial(torch.bfloat16),
    _Trial(torch.float16),
    _Trial(torch.float64),
    _Trial(torch.float32, rows=1, tables=1, tokens=1),
    _Trial(torch.float32, tokens=4097),
)


def _computes(function: Function, rotation: Rotation, head_size: int) -> bool:
    """Return True if a function rotates random heads as the op does, with tables for 8 elements."""
    generator = torch.Generator().manual_seed(0)
    return all(_agrees(function, rotation, head_size, trial, generator) for trial in _TRIALS)


def _agrees(
    function: Function,
    rotation: Rotation,
    head_size: int,
    trial: _Trial,
    generator: torch.Generator,
) -> bool:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float32, device="cpu", generator=generator)

    query = random(trial.rows, 4, trial.tokens, head_size).to(trial.dtype)
    # Functions must take fewer heads of keys, too.
    key = random(trial.rows, 2, trial.tokens, head_size).to(trial.dtype)
    angles = rotation.twice(random(trial.tables, trial.tokens, 4))
    cos = angles.cos().to(trial.dtype)
    sin = angles.sin().to(trial.dtype)
    op = _Native(rotation.is_neox_style())

    try:
        with NoQuestions():
            results: Any = function(query, key, cos, sin)
        expected = [rotation.apply(op, x, cos, sin) for x in (query, key)]
    except Exception:  # a function of another kind may raise anything
        return False

    if len(results) != 2:
        return False

    pairs = zip(results, expected, strict=True)
    return all(_close(result, wanted, trial.tolerance()) for result, wanted in pairs)


class _Native(nn.Module):
    """The definition of the op, whatever kernels are bound here."""

    def __init__(self, is_neox_style: bool) -> None:
        super().__init__()
        self.is_neox_style = is_neox_style

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        op = ApplyRotaryEmb(is_neox_style=self.is_neox_style)
        return ApplyRotaryEmb.forward_native(op, x, cos, sin)


def _close(result: Any, expected: Tensor, tolerance: float) -> bool:
    if not isinstance(result, Tensor):
        return False
    if (result.shape, result.dtype) != (expected.shape, expected.dtype):
        return False
    return torch.allclose(result, expected, atol=tolerance, rtol=tolerance)
