"""Presence, frequency and repetition penalties over the tokens that requests have seen."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate

import torch
from opgraft.engine.sampling.row import Row
from torch import Tensor


class Penalties:
    """Penalties of the rows that have some, kept by the tokens that occur: the others of the vocabulary cost nothing.

    Args:
        rows: position among the logits and request of each row with a penalty.
        vocabulary: tokens that logits are given for; others in a prompt are left out.
        device: of the logits.
    """

    def __init__(
        self, rows: Sequence[tuple[int, Row]], vocabulary: int, device: torch.device
    ) -> None:
        self._vocabulary, self._device = vocabulary, device
        self._params = {index: row.params for index, row in rows}
        known = [row.counted(vocabulary) for _, row in rows]
        sizes = [len(each.tokens) for each in known]
        starts = [0, *accumulate(sizes)]
        self._size = starts[-1]
        self._spans = {
            index: (start, size)
            for (index, _), start, size in zip(rows, starts, sizes, strict=False)
        }
        self._later: dict[tuple[int, int], int] = {}
        self._new: list[int] = []
        self._touched: list[int] = []
        repeats = torch.tensor(sizes, dtype=torch.int64)
        first = torch.tensor([index * vocabulary for index in self._params], dtype=torch.int64)
        tokens = _joined((each.tokens for each in known), torch.int64)
        self._places = (tokens + first.repeat_interleave(repeats)).to(device)
        self._counts = _joined((each.counts for each in known), torch.float32).to(device)
        self._settings = (
            self._settings_of(self._params).repeat_interleave(repeats, dim=1).to(device)
        )

    def append(self, index: int, token: int, slot: int) -> None:
        """Count a token of the output of a row, which has the slot in the row's ``TokenCounts``."""
        start, size = self._spans[index]
        if slot < size:
            self._touched.append(start + slot)
            return
        if (index, slot) not in self._later:
            self._later[index, slot] = self._size + len(self._later)
            self._new.append(index * self._vocabulary + token)
        self._touched.append(self._later[index, slot])

    def apply(self, logits: Tensor) -> None:
        """Change logits ``[n, vocabulary]`` float32 in place: repetition first, then frequency and presence.

        Repetition divides logits above 0 and multiplies the others, of tokens in prompt and output. Frequency counts,
        and presence notes, tokens of the output only.
        """
        self._count()
        repetition, frequency, presence = self._settings
        flat = logits.view(-1)
        values = flat[self._places]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= frequency * self._counts
        values -= presence * (self._counts > 0)
        flat[self._places] = values

    def _count(self) -> None:
        if self._new:
            places = torch.tensor(self._new, dtype=torch.int64, device=self._device)
            settings = self._settings_of([place // self._vocabulary for place in self._new]).to(
                self._device
            )
            self._places = torch.cat((self._places, places))
            self._settings = torch.cat((self._settings, settings), dim=1)
            self._counts = torch.nn.functional.pad(self._counts, (0, len(places)))
            self._new.clear()
        if self._touched:
            touched = torch.tensor(self._touched, device=self._device)
            self._counts.index_add_(0, touched, self._counts.new_ones(len(touched)))
            self._touched.clear()

    def _settings_of(self, rows: Collection[int]) -> Tensor:
        """Return ``[3, rows]`` with the penalties of some rows."""
        params = [self._params[row] for row in rows]
        return torch.tensor(
            [[getattr(each, name) for each in params] for name in _NAMES], dtype=torch.float32
        )


_NAMES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


def _joined(parts: Iterable[array[int] | array[float]], dtype: torch.dtype) -> Tensor:
    """Return the numbers of arrays as one tensor."""
    data = bytearray(b"".join(parts))
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
