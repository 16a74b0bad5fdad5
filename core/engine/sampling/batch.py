"""``SamplingBatch``: the requests to sample for, with the tensors of their settings."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
from opgraft.engine.sampling.adjustments import Adjustments
from opgraft.engine.sampling.drawing import Filters
from opgraft.engine.sampling.random_numbers import noise_key, stream_of
from opgraft.engine.sampling.row import SamplingRow
from opgraft.engine.sampling.structured import Grammar
from opgraft.engine.sampling_params import SamplingParams
from opgraft.errors import RequestError
from torch import Tensor


@dataclass(frozen=True)
class SamplingPlan:
    """Tensors of the settings of a batch, made when its requests change.

    Attributes:
        drawn: rows to draw for: first rows without filters, then rows with filters. Greedy rows are
            left out.
        num_unfiltered: drawn rows without filters.
        rows: ``drawn`` as a tensor; ``None`` if ``drawn`` has all rows in their order.
        temperature: ``[drawn, 1]``.
        filters: of the filtered rows.
        adjustments: changes to the logits, for any row.
        logprobs: rows with log-probabilities, each with their number.
    """

    drawn: tuple[int, ...]
    num_unfiltered: int
    rows: Tensor | None
    temperature: Tensor
    filters: Filters
    adjustments: Adjustments
    logprobs: tuple[tuple[int, int], ...]


class SamplingBatch:
    """Requests to sample for, each under a key such as its id.

    The batch keeps requests between steps. ``select`` names the request of each row of the next
    logits. Before the first ``select``, and after a request is added or removed, the rows are all
    requests in the order of their addition. Tensors are made anew only if the rows have changed.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._all: dict[Hashable, SamplingRow] = {}
        self._stale = False
        self._keys: tuple[Hashable, ...] = ()
        self._places: dict[Hashable, int] = {}
        self._rows: list[SamplingRow] = []
        self._plan: SamplingPlan | None = None
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
    def rows(self) -> Sequence[SamplingRow]:
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
        """Add a request, new or resumed, as the last row.

        Args:
            key: of the request, for ``remove``, ``append`` and errors.
            params: settings of the request.
            prompt: token ids.
            output: tokens sampled before.
            arrival: number in the order of arrival. If ``params.seed`` is ``None``, this number and
                the seed of the batch seed the request.
            eos: tokens that end the request, beside ``params.stop_token_ids``.
            bad_words: the tokens of ``params.bad_words``, from ``bad_word_tokens``.
            grammar: compiled from ``params.structured_output``.

        Raises:
            RequestError: another request has the key, bad words come without tokens, a structured
                output without grammar, or the output does not follow the grammar.
        """
        tokens = list(output)
        words = tuple(tuple(word) for word in bad_words if word)
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
                f"request {key!r} has a structured output without its grammar: compile one and "
                "pass it"
            )
        stop = tuple(params.stop_token_ids)
        if not params.ignore_eos:
            stop += tuple(eos)
        state = grammar.start(tokens) if grammar else None
        stream = stream_of(params.seed, arrival, self._seed)
        self._all[key] = SamplingRow(params, prompt, tokens, stream, stop, words, state)
        self._stale = True

    def remove(self, key: Hashable) -> None:
        """Forget a request.

        Raises:
            RequestError: the batch has no request of this key.
        """
        self._row(key)
        del self._all[key]
        self._stale = True

    def select(self, keys: Iterable[Hashable]) -> None:
        """Choose the requests of the rows of the next logits, in their order. Others wait.

        Raises:
            RequestError: the batch has no request of a key.
        """
        wanted = tuple(keys)
        if self._stale or wanted != self._keys:
            for key in wanted:
                self._row(key)
            self._show(wanted)

    def append(self, key: Hashable, token: int) -> None:
        """Add a token to the output of a request.

        Raises:
            RequestError: the batch has no request of this key, or its grammar does not allow the
                token.
        """
        row = self._row(key)
        if row.grammar:
            row.grammar.accept(token)
        row.output.append(token)
        if not row.counts:
            return
        slot = row.counts.add(token)
        if slot is not None and self._plan and not self._stale:
            self._plan.adjustments.append(self._places.get(key), token, slot)

    def extend(self, tokens: Iterable[tuple[Hashable, int]]) -> dict[Hashable, str]:
        """Add a token to the output of each of some requests.

        Returns:
            By key, the reason for each request with a grammar that does not allow the token.

        Raises:
            RequestError: the batch has no request of a key.
        """
        refused: dict[Hashable, str] = {}
        for key, token in tokens:
            row = self._row(key)
            # Most requests need no more.
            if row.grammar is None and row.counts is None:
                row.output.append(token)
                continue
            try:
                self.append(key, token)
            except RequestError as error:
                refused[key] = str(error)
        return refused

    def ends(self, key: Hashable, token: int) -> bool:
        """Return True if a sampled token ends the request.

        Before ``min_tokens``, such tokens are banned.

        Raises:
            RequestError: the batch has no request of this key.
        """
        return token in self._row(key).stop

    def noise_keys(self, rows: Iterable[int]) -> list[int]:
        """Return the key of the random numbers for the next token of each row."""
        shown = self.rows
        return [noise_key(shown[row].stream, len(shown[row].output)) for row in rows]

    def plan(self, vocabulary: int, device: torch.device) -> SamplingPlan:
        """Return the tensors of the rows, for logits of this width on this device."""
        self._refresh()
        if self._plan is None or self._plan_for != (vocabulary, device):
            self._plan = _plan(self._rows, vocabulary, device)
            self._plan_for = (vocabulary, device)
        return self._plan

    def _row(self, key: Hashable) -> SamplingRow:
        if key not in self._all:
            raise RequestError(f"the batch has no request {key!r}: add it first")
        return self._all[key]

    def _refresh(self) -> None:
        if self._stale:
            self._show(tuple(self._all))

    def _show(self, keys: tuple[Hashable, ...]) -> None:
        self._keys = keys
        self._stale = False
        self._places = {key: index for index, key in enumerate(keys)}
        self._rows = [self._all[key] for key in keys]
        self._plan = None


def _plan(rows: Sequence[SamplingRow], vocabulary: int, device: torch.device) -> SamplingPlan:
    unfiltered = []
    filtered = []
    logprobs = []
    for index, row in enumerate(rows):
        if row.params.logprobs is not None:
            logprobs.append((index, row.params.logprobs))
        if row.params.greedy:
            continue
        if row.filtered:
            filtered.append(index)
        else:
            unfiltered.append(index)
    drawn = (*unfiltered, *filtered)
    all_in_order = drawn == tuple(range(len(rows)))
    chosen = None if all_in_order else torch.tensor(drawn, dtype=torch.int64, device=device)
    temperatures = [[rows[index].params.temperature] for index in drawn]
    return SamplingPlan(
        drawn=drawn,
        num_unfiltered=len(unfiltered),
        rows=chosen,
        temperature=torch.tensor(temperatures, dtype=torch.float32, device=device),
        filters=_filters([rows[index].params for index in filtered], device),
        adjustments=Adjustments(rows, vocabulary, device),
        logprobs=tuple(logprobs),
    )


def _filters(params: Sequence[SamplingParams], device: torch.device) -> Filters:
    top_k = [each.top_k for each in params]
    top_p = [each.top_p for each in params]
    min_p = [each.min_p for each in params]
    return Filters.of(top_k, top_p, min_p, device)
