"""Changes to logits before a token is chosen: bans, allowed tokens, biases, users' processors and penalties."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from opgraft.base.text import described
from opgraft.engine.sampling.penalties import Penalties
from opgraft.engine.sampling.row import Row
from opgraft.errors import RequestError
from torch import Tensor

_BANNED_BITS = (
    torch.tensor(
        [[not byte >> bit & 1 for bit in range(8)] for byte in range(256)], dtype=torch.bool
    )
    .view(torch.int64)
    .flatten()
)
"""By byte of a mask: its 8 tokens, as 8 bools in the memory of one integer."""


class Adjustments:
    """Changes that the rows of a batch ask for, prepared once and applied to the logits of each step.

    Args:
        rows: the requests, in the order of the logits.
        vocabulary: tokens that logits are given for.
        device: of the logits.
    """

    def __init__(self, rows: Sequence[Row], vocabulary: int, device: torch.device) -> None:
        self._vocabulary, self._device = vocabulary, device
        numbered = list(enumerate(rows))
        self._grammars = [(index, row.grammar) for index, row in numbered if row.grammar]
        self._allowed = [
            (
                index,
                self._indices(
                    [token for token in row.params.allowed_token_ids if token < vocabulary]
                ),
            )
            for index, row in numbered
            if row.params.allowed_token_ids is not None
        ]
        self._restricted = [(index, row) for index, row in numbered if row.restricted]
        self._processed = [(index, row) for index, row in numbered if row.params.logits_processors]
        biases = {
            index * vocabulary + token: bias
            for index, row in numbered
            for token, bias in row.params.logit_bias.items()
            if token < vocabulary
        }
        values = torch.tensor(list(biases.values()), dtype=torch.float32, device=device)
        self._bias = (self._indices(list(biases)), values) if biases else ()
        penalised = [(index, row) for index, row in numbered if row.penalised]
        self._penalties = Penalties(penalised, vocabulary, device) if penalised else None
        self.any = bool(
            self._grammars
            or self._allowed
            or self._restricted
            or self._processed
            or biases
            or penalised
        )

    def append(self, index: int | None, token: int, slot: int) -> None:
        """Take note of a token that was added to the output of a row, and of its slot in the row's counts.

        The index is ``None`` where the row is not shown.
        """
        if self._penalties and index is not None:
            self._penalties.append(index, token, slot)

    def apply(self, logits: Tensor) -> dict[int, str]:
        """Change logits ``[n, vocabulary]`` float32 in place.

        Returns:
            By row, why it cannot be sampled.
        """
        errors = self._allow(logits)
        for index, tokens in self._allowed:
            kept = logits[index, tokens]
            logits[index] = float("-inf")
            logits[index, tokens] = kept
        if self._restricted:
            banned = [
                index * self._vocabulary + token
                for index, row in self._restricted
                for token in row.banned()
                if token < self._vocabulary
            ]
            logits.view(-1).index_fill_(0, self._indices(banned), float("-inf"))
        if self._bias:
            logits.view(-1).index_add_(0, *self._bias)
        errors |= {
            index: error
            for index, row in self._processed
            if (error := _process(logits[index], row))
        }
        if self._penalties:
            self._penalties.apply(logits)
        return errors

    def _allow(self, logits: Tensor) -> dict[int, str]:
        """Ban what grammars do not allow; tokens beyond a grammar's vocabulary are never allowed."""
        errors: dict[int, str] = {}
        if not self._grammars:
            return errors
        masks = torch.zeros(len(self._grammars), -(-self._vocabulary // 32), dtype=torch.int32)
        for mask, (index, grammar) in zip(masks, self._grammars, strict=True):
            try:
                grammar.fill(mask)
            except RequestError as error:
                errors[index] = str(error)
        banned = _BANNED_BITS[masks.view(torch.uint8).int()].view(torch.bool)[:, : self._vocabulary]
        rows = [index for index, _ in self._grammars]
        if len(rows) == len(logits):
            logits.masked_fill_(banned.to(self._device), float("-inf"))
        else:
            at = self._indices(rows)
            logits[at] = logits[at].masked_fill_(banned.to(self._device), float("-inf"))
        return errors

    def _indices(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _process(logits: Tensor, row: Row) -> str | None:
    """Let the processors of a request change its logits, and return what went wrong."""
    for processor in row.params.logits_processors:
        try:
            result = processor(*_arguments(processor, row), logits.clone())
            if isinstance(result, Tensor) and result.shape == logits.shape:
                logits.copy_(result)  # which no tensor without numbers or of another layout is for
                continue
        except (
            Exception,
            SystemExit,
        ) as error:  # users' code raises anything, and must end no other request
            return f"its logits processor {processor!r:.80} raised {described(error)}"
        shape = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        return f"its logits processor {processor!r:.80} returned {shape}, expected a tensor {tuple(logits.shape)}"
    return None


def _arguments(processor: Callable[..., Any], row: Row) -> tuple[list[int], ...]:
    """Return what a processor takes before the logits: the output; prompt and output where it has to have three.

    Raises:
        TypeError: it has to have something by name, too.
    """
    required = [
        each
        for each in inspect.signature(processor).parameters.values()
        if each.default is each.empty
    ]
    named = [each.name for each in required if each.kind is each.KEYWORD_ONLY]
    if named:
        raise TypeError(
            f"it has to have {', '.join(named)} by name, and is given the output and the logits alone: give that a "
            "default, or bind it by functools.partial"
        )
    return (list(row.prompt), list(row.output)) if len(required) == 3 else (list(row.output),)
