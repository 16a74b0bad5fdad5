"""``SamplingBatch``: the requests that tokens are sampled for, with the tensors of their settings."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
from opgraft.engine.sampling.adjustments import Adjustments
from opgraft.engine.sampling.drawing import Filters
from opgraft.engine.sampling.random_numbers import noise_key, stream_of
from opgraft.engine.sampling.row import Row
from opgraft.engine.sampling.structured import Grammar
from opgraft.engine.sampling_params import SamplingParams
from opgraft.errors import RequestError
from torch import Tensor


@dataclass(frozen=True)
class Plan:
    """Tensors of the settings of a batch, made when its requests change.

    Attributes:
        drawn: rows that are not greedy: first those that draw from the whole vocabulary, then those with filters.
        free: how many of these have no filters.
        rows: ``drawn`` as a tensor; ``None`` where these are all rows in their order.
        temperature: ``[drawn, 1]``.
        filters: of the filtered rows.
        adjustments: changes to the logits, for any row.
        logprobs: rows that ask for log-probabilities, and how many.
    """

    drawn: tuple[int, ...]
    free: int
    rows: Tensor | None
    temperature: Tensor
    filters: Filters
    adjustments: Adjustments
    logprobs: tuple[tuple[int, int], ...]


class SamplingBatch:
    """Requests that tokens are sampled for, each under a key such as its id.

    It holds requests between steps: ``select`` says which of them the rows of the logits stand for. Until it does, and
    after one is added or removed, these are all in the order in which they were added. Tensors are made anew only when
    they are asked for after the rows have changed.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._all: dict[Hashable, Row] = {}
        self._stale = False
        self._keys: tuple[Hashable, ...] = ()
        self._places: dict[Hashable, int] = {}
        self._rows: list[Row] = []
        self._plan: Plan | None = None
        self._plan_for: tuple[int, torch.device] | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._all

    @property
    def keys(self) -> tuple[Hashable, ...]:
        """Return the key of each row of the logits."""
        self._refresh()
        return self._keys

    @property
    def rows(self) -> Sequence[Row]:
        """Return the request of each row of the logits."""
        self._refresh()
        return self._rows

    def add(
        self,
        key: Hashable,
        params: SamplingParams,
        prompt: Sequence[int],
        output: Iterable[int] = (),
        *,
        arrival: int = 0,
        eos: Iterable[int] = (),
        bad_words: Iterable[Sequence[int]] = (),
        grammar: Grammar | None = None,
    ) -> None:
        """Add a request, new or resumed; it becomes the last row.

        Args:
            key: names it in ``remove``, ``append`` and errors.
            params: its settings.
            prompt: its token ids.
            output: tokens that were sampled before.
            arrival: its number in the order of arrival, which with the batch's seed seeds it where ``params.seed``
                is ``None``.
            eos: tokens that end it beside ``params.stop_token_ids``.
            bad_words: the tokens of ``params.bad_words``, as ``bad_word_tokens`` gives them.
            grammar: compiled from ``params.structured_output``.

        Raises:
            RequestError: the key is held by another, bad words come without tokens, a structured output without
                grammar, or the output does not follow the grammar.
        """
        tokens, words = list(output), tuple(tuple(word) for word in bad_words if word)
        if key in self._all:
            raise RequestError(
                f"request {key!r} is in the batch already: remove it before it is added again"
            )
        if params.bad_words and not words:
            raise RequestError(
                f"request {key!r} has bad words without their tokens: pass bad_words to the batch"
            )
        if params.structured_output is not None and grammar is None:
            raise RequestError(
                f"request {key!r} has a structured output without its grammar: compile one and pass it"
            )
        stop = (*params.stop_token_ids, *(() if params.ignore_eos else eos))
        state = grammar.start(tokens) if grammar else None
        self._all[key] = Row(
            params, prompt, tokens, stream_of(params.seed, arrival, self._seed), stop, words, state
        )
        self._stale = True

    def remove(self, key: Hashable) -> None:
        """Forget a request.

        Raises:
            RequestError: the batch has none of that key.
        """
        self._row(key)
        del self._all[key]
        self._stale = True

    def select(self, keys: Iterable[Hashable]) -> None:
        """Say which requests the rows of the next logits stand for, in their order; the others wait.

        Raises:
            RequestError: the batch has none of a key.
        """
        wanted = tuple(keys)
        if self._stale or wanted != self._keys:
            for key in wanted:
                self._row(key)
            self._show(wanted)

    def append(self, key: Hashable, token: int) -> None:
        """Add a token to the output of a request.

        Raises:
            RequestError: the batch has none of that key, or the grammar of the request does not allow the token.
        """
        row = self._row(key)
        if row.grammar:
            row.grammar.accept(token)
        row.output.append(token)
        if (
            row.counts
            and (slot := row.counts.add(token)) is not None
            and self._plan
            and not self._stale
        ):
            self._plan.adjustments.append(self._places.get(key), token, slot)

    def extend(self, tokens: Iterable[tuple[Hashable, int]]) -> dict[Hashable, str]:
        """Add a token to the output of each of some requests, and return which grammars do not allow theirs, and why.

        Raises:
            RequestError: the batch has none of a key.
        """
        refused: dict[Hashable, str] = {}
        for key, token in tokens:
            row = self._row(key)
            if row.grammar is None and row.counts is None:
                row.output.append(token)
                continue
            try:
                self.append(key, token)
            except RequestError as error:
                refused[key] = str(error)
        return refused

    def noise_keys(self, rows: Iterable[int]) -> list[int]:
        """Return the key of the random numbers of the next token of each of some rows."""
        shown = self.rows
        return [noise_key(shown[row].stream, len(shown[row].output)) for row in rows]

    def plan(self, vocabulary: int, device: torch.device) -> Plan:
        """Return the tensors of the rows for logits of a size and on a device."""
        self._refresh()
        if self._plan is None or self._plan_for != (vocabulary, device):
            self._plan, self._plan_for = _plan(self._rows, vocabulary, device), (vocabulary, device)
        return self._plan

    def _row(self, key: Hashable) -> Row:
        if key not in self._all:
            raise RequestError(f"the batch has no request {key!r}: add it first")
        return self._all[key]

    def _refresh(self) -> None:
        if self._stale:
            self._show(tuple(self._all))

    def _show(self, keys: tuple[Hashable, ...]) -> None:
        self._keys, self._stale = keys, False
        self._places = {key: index for index, key in enumerate(keys)}
        self._rows = [self._all[key] for key in keys]
        self._plan = None


def _plan(rows: Sequence[Row], vocabulary: int, device: torch.device) -> Plan:
    free = [index for index, row in enumerate(rows) if not (row.params.greedy or row.filtered)]
    filtered = [index for index, row in enumerate(rows) if row.filtered and not row.params.greedy]
    drawn = (*free, *filtered)
    limits = [rows[index].params for index in filtered]
    temperatures = [[rows[index].params.temperature] for index in drawn]
    logprobs = ((index, row.params.logprobs) for index, row in enumerate(rows))
    return Plan(
        drawn=drawn,
        free=len(free),
        rows=None
        if drawn == tuple(range(len(rows)))
        else torch.tensor(drawn, dtype=torch.int64, device=device),
        temperature=torch.tensor(temperatures, dtype=torch.float32, device=device),
        filters=Filters.of(
            [p.top_k for p in limits], [p.top_p for p in limits], [p.min_p for p in limits], device
        ),
        adjustments=Adjustments(rows, vocabulary, device),
        logprobs=tuple((index, count) for index, count in logprobs if count is not None),
    )
