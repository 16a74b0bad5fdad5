"""Presence, frequency and repetition penalties over the tokens that requests have seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

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

    def __init__(self, rows: Sequence[tuple[int, Row]], vocabulary: int, device: torch.device) -> None:
        self._vocabulary, self._device = vocabulary, device
        self._params = {index: row.params for index, row in rows}
        self._slots: dict[int, int] = {}
        self._new: list[tuple[int, int]] = []
        counts: list[int] = []
        for index, row in rows:
            prompt = row.prompt if row.params.repetition_penalty != 1 else ()
            for token, count in (dict.fromkeys(prompt, 0) | Counter(row.output)).items():
                if token < vocabulary:
                    self._slots[index * vocabulary + token] = len(self._slots)
                    counts.append(count)
        self._counts = torch.tensor(counts, dtype=torch.float32, device=device)
        self._places, self._settings = self._tensors(list(self._slots))

    def append(self, index: int, token: int) -> None:
        """Count a token of the output of a row."""
        if index in self._params and token < self._vocabulary:
            self._new.append((index, token))

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
        if not self._new:
            return
        known = len(self._slots)
        touched = [
            self._slots.setdefault(index * self._vocabulary + token, len(self._slots)) for index, token in self._new
        ]
        self._new.clear()
        if len(self._slots) > known:
            places, settings = self._tensors(list(self._slots)[known:])
            self._places = torch.cat((self._places, places))
            self._settings = torch.cat((self._settings, settings), dim=1)
            self._counts = torch.nn.functional.pad(self._counts, (0, len(places)))
        self._counts.index_add_(0, torch.tensor(touched, device=self._device), self._counts.new_ones(len(touched)))

    def _tensors(self, places: list[int]) -> tuple[Tensor, Tensor]:
        """Make positions in the flat logits, and ``[3, places]`` with the penalties there."""
        given = [self._params[place // self._vocabulary] for place in places]
        settings = [[getattr(params, name) for params in given] for name in _NAMES]
        return (
            torch.tensor(places, dtype=torch.int64, device=self._device),
            torch.tensor(settings, dtype=torch.float32, device=self._device),
        )


_NAMES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
