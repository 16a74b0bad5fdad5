"""The kernel of attention over pages under random traffic, against attention in float64 over what each sequence has."""

from __future__ import annotations

import random

import pytest
import torch
from cpu_kernels.test_attention import BLOCK, CODES, DTYPES, unread
from opgraft.ops.attention.codes import quantize_rows
from opgraft.ops.attention.codes_spec import decoded_rows
from torch import Tensor

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


class Sequence:
    """A sequence: its blocks, and keys and values as the cache holds them, ``[tokens, heads, size]``."""

    def __init__(self, heads: int, size: int) -> None:
        self.blocks: list[int] = []
        self.keys = self.values = torch.zeros(0, heads, size, dtype=torch.float64)


class Traffic:
    """A model's layer that serves sequences which come, grow by random numbers of tokens, share blocks, and end."""

    def __init__(self, seed: int, dtype: torch.dtype, codes: torch.dtype | None) -> None:
        from opgraft_cpu_kernels import attention

        self.draw, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)  # noqa: S311
        self.dtype, self.codes = dtype, codes
        self.heads, self.size = self.draw.choice((1, 2, 3)), self.draw.choice((16, 48, 64, 80, 128))
        self.query_heads = self.heads * self.draw.choice((1, 3, 4, 7))
        self.block = self.draw.choice((16, BLOCK, 48))
        shape = attention.cache_shape(90, self.heads, self.block, self.size, codes)
        self.cache = unread(shape, codes or dtype)
        self.users = [0] * 90
        self.sequences: list[Sequence] = []
        self.settings = {
            "sliding_window": self.draw.choice((None, None, 1, 17, 150, 10**6)),
            "logits_soft_cap": self.draw.choice((None, None, 2.5)),
            "sinks": self.draw.choice((None, torch.linspace(-2, 5, self.query_heads))),
        }

    def step(self) -> None:
        """Serve some sequences with some tokens each, and compare what they get."""
        self._come_and_go()
        counts = [self.draw.choice((0, 1, 1, 1, 2, 16, 31, 33, 90)) for _ in self.sequences]
        room = self.users.count(0) * self.block
        for row, (sequence, count) in enumerate(zip(self.sequences, counts, strict=True)):
            counts[row] = count = min(count, max(0, room - self.block))
            room -= count + self.block * bool(count)
            while len(sequence.blocks) * self.block < len(sequence.keys) + count:
                self._take(
                    sequence,
                    self.draw.choice([b for b, users in enumerate(self.users) if not users]),
                )
        query, key, value = self._tokens(sum(counts))
        scale = self.size**-0.5
        slots, expected, done = [], [], 0
        for sequence, count in zip(self.sequences, counts, strict=True):
            rows, before = slice(done, done + count), len(sequence.keys)
            places = range(before, before + count)
            slots += [
                sequence.blocks[p // self.block] * self.block + p % self.block for p in places
            ]
            sequence.keys = torch.cat((sequence.keys, self._held(key[rows])))
            sequence.values = torch.cat((sequence.values, self._held(value[rows])))
            expected.append(
                attended(
                    query[rows].double(), sequence.keys, sequence.values, scale, **self.settings
                )
            )
            done += count
        starts = torch.tensor([0, *counts]).cumsum(0)
        lengths = torch.tensor([len(sequence.keys) for sequence in self.sequences])
        got = torch.ops.opgraft_cpu_kernels.attend_pages(
            query, key, value, self.cache, torch.tensor(slots, dtype=torch.int64), self._table(counts), starts, lengths,
            scale, *self.settings.values(),
        )  # fmt: skip
        torch.testing.assert_close(
            got.double(),
            torch.cat(expected),
            atol=TOLERANCE[self.dtype],
            rtol=TOLERANCE[self.dtype],
        )

    def _come_and_go(self) -> None:
        for sequence in [
            s for s in self.sequences if self.draw.random() < 0.15 or len(s.keys) > 700
        ]:
            self.sequences.remove(sequence)
            for block in sequence.blocks:
                self.users[block] -= 1
        while len(self.sequences) < self.draw.randint(1, 6):
            new = Sequence(self.heads, self.size)
            if self.sequences and self.draw.random() < 0.5:
                other = self.draw.choice(self.sequences)
                full = self.draw.randint(0, len(other.keys) // self.block)
                new.keys, new.values = (x[: full * self.block] for x in (other.keys, other.values))
                for block in other.blocks[:full]:
                    self._take(new, block)
            self.sequences.append(new)
        self.draw.shuffle(self.sequences)

    def _take(self, sequence: Sequence, block: int) -> None:
        sequence.blocks.append(block)
        self.users[block] += 1

    def _tokens(self, count: int) -> tuple[Tensor, ...]:
        """Draw query, key and value, at times as parts of one tensor, some heads much larger than others."""
        sizes = [self.query_heads * self.size, *(2 * [self.heads * self.size])]
        joint = torch.randn(count, sum(sizes), generator=self.generator)
        joint *= self.draw.choice((0.1, 1.0, 2.0))
        parts = joint.to(self.dtype).split(sizes, dim=1)
        if self.draw.random() < 0.5:
            parts = tuple(part.contiguous() for part in parts)
        return tuple(part.unflatten(1, (-1, self.size)) for part in parts)

    def _held(self, x: Tensor) -> Tensor:
        return decoded_rows(quantize_rows(x, self.codes)) if self.codes else x.double()

    def _table(self, counts: list[int]) -> Tensor:
        most = max(len(sequence.blocks) for sequence in self.sequences) + self.draw.randint(0, 2)
        table = torch.full((len(self.sequences), most), -7, dtype=torch.int32)
        for row, sequence in zip(table, self.sequences, strict=True):
            row[: len(sequence.blocks)] = torch.tensor(sequence.blocks)
        if window := self.settings[
            "sliding_window"
        ]:  # as the engine, which gives back what slid out of a window
            for row, sequence, count in zip(table, self.sequences, counts, strict=True):
                row[: max(0, len(sequence.keys) - count + 1 - window) // self.block] = -7
        return table


def attended(
    query: Tensor, keys: Tensor, values: Tensor, scale: float,
    sliding_window: int | None, logits_soft_cap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attend with the last tokens of a sequence in float64, every score by itself."""
    shared = torch.arange(query.shape[1]) // (query.shape[1] // keys.shape[1])
    scores = torch.einsum("qhe,khe->hqk", query, keys[:, shared]) * scale
    if logits_soft_cap:
        scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
    behind = torch.arange(len(keys))[len(keys) - len(query) :, None] - torch.arange(len(keys))
    seen = (behind >= 0) & (behind < (sliding_window or len(keys)))
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double().view(-1, 1, 1).expand(-1, len(query), 1)), -1)
    return torch.einsum("hqk,khe->qhe", scores.softmax(-1)[..., : len(keys)], values[:, shared])


KINDS = [(dtype, codes) for dtype in DTYPES for codes in (None, *CODES)]


@pytest.mark.parametrize(
    ("seed", "dtype", "codes"),
    [
        pytest.param(seed, *kind, marks=[pytest.mark.slow] * (number != 4 * seed))
        for seed in range(6)
        for number, kind in enumerate(KINDS)
    ],
)
def test_random_traffic(
    seed: int, dtype: torch.dtype, codes: torch.dtype | None, path: str
) -> None:
    """Every token gets what its sequence gives it in float64, whatever comes beside it and lies in other blocks."""
    traffic = Traffic(seed, dtype, codes)
    for _ in range(25):
        traffic.step()
