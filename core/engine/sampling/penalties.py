"""Presence, frequency and repetition penalties for the tokens of requests."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence

import torch
from opgraft.engine.sampling.row import SamplingRow
from opgraft.engine.sampling.token_counts import TokenCounts
from torch import Tensor


class Penalties:
    """Penalties of some rows, for the tokens that occur. Other tokens cost nothing.

    Args:
        rows: for each request with a penalty, the number of its row among the logits.
        vocabulary: number of logits of a row. Tokens of a prompt beyond it are left out.
        device: of the logits.
    """

    def __init__(
        self, rows: Sequence[tuple[int, SamplingRow]], vocabulary: int, device: torch.device
    ) -> None:
        self._vocabulary = vocabulary
        self._device = device
        self._params = {index: row.params for index, row in rows}
        # Tokens of all rows stand in one tensor, those of a row in one span.
        self._spans: dict[int, tuple[int, int]] = {}
        self._size = 0
        known = []
        for index, row in rows:
            counts = row.counted(vocabulary)
            known.append(counts)
            self._spans[index] = (self._size, len(counts.tokens))
            self._size += len(counts.tokens)
        # Tokens that occurred later come after all spans.
        self._later: dict[tuple[int, int], int] = {}
        self._new: list[int] = []
        self._touched: list[int] = []
        self._fill_tensors(known)

    def _fill_tensors(self, known: Sequence[TokenCounts]) -> None:
        """Make the tensors of the tokens so far: places in the logits, counts and penalties."""
        sizes = torch.tensor([len(each.tokens) for each in known], dtype=torch.int64)
        starts = [index * self._vocabulary for index in self._params]
        first_places = torch.tensor(starts, dtype=torch.int64).repeat_interleave(sizes)
        tokens = _joined((each.tokens for each in known), torch.int64)
        counts = _joined((each.counts for each in known), torch.float32)
        settings = self._settings_of(self._params).repeat_interleave(sizes, dim=1)
        self._places = (tokens + first_places).to(self._device)
        self._counts = counts.to(self._device)
        self._settings = settings.to(self._device)

    def append(self, index: int, token: int, slot: int) -> None:
        """Count a token of the output of a row.

        Args:
            index: the number of the row.
            token: the new token.
            slot: the slot of the token in the ``TokenCounts`` of the row.
        """
        start, size = self._spans[index]
        if slot < size:
            self._touched.append(start + slot)
            return
        if (index, slot) not in self._later:
            self._later[index, slot] = self._size + len(self._later)
            self._new.append(index * self._vocabulary + token)
        self._touched.append(self._later[index, slot])

    def apply(self, logits: Tensor) -> None:
        """Change logits ``[n, vocabulary]`` float32 in place.

        The order is repetition, frequency, presence. Repetition divides logits above 0, and
        multiplies the others, for tokens in prompt and output. Frequency and presence look at
        tokens of the output only: frequency at their number, presence at whether there are any.
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
        """Add the tokens since the last step to the tensors."""
        if self._new:
            places = torch.tensor(self._new, dtype=torch.int64, device=self._device)
            rows = [place // self._vocabulary for place in self._new]
            settings = self._settings_of(rows).to(self._device)
            self._places = torch.cat((self._places, places))
            self._settings = torch.cat((self._settings, settings), dim=1)
            self._counts = torch.nn.functional.pad(self._counts, (0, len(places)))
            self._new.clear()
        if self._touched:
            touched = torch.tensor(self._touched, device=self._device)
            self._counts.index_add_(0, touched, self._counts.new_ones(len(touched)))
            self._touched.clear()

    def _settings_of(self, rows: Collection[int]) -> Tensor:
        """Return ``[3, rows]`` with the penalties of some rows, in the order of ``_NAMES``."""
        params = [self._params[row] for row in rows]
        penalties = [[getattr(each, name) for each in params] for name in _NAMES]
        return torch.tensor(penalties, dtype=torch.float32)


_NAMES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


def _joined(parts: Iterable[array[int] | array[float]], dtype: torch.dtype) -> Tensor:
    """Return the numbers of arrays as one tensor."""
    # Writable, because torch warns of memory that is not.
    data = bytearray(b"".join(parts))
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
