"""Changes to logits before the choice of a token: bans, biases, processors of users, penalties."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from opgraft.base.text import described
from opgraft.engine.sampling.penalties import Penalties
from opgraft.engine.sampling.row import SamplingRow
from opgraft.errors import RequestError
from torch import Tensor

_UNSET_BITS = [[not byte >> bit & 1 for bit in range(8)] for byte in range(256)]
_BANNED_BITS = torch.tensor(_UNSET_BITS, dtype=torch.bool).view(torch.int64).flatten()
"""For each byte of a mask, 8 bools in the memory of one integer: True for a banned token."""


class Adjustments:
    """Changes that the requests of a batch ask for.

    The tensors are prepared once. ``apply`` changes the logits of each step.

    Args:
        rows: the requests, in the order of the logits.
        vocabulary: number of logits of a row.
        device: of the logits.

    Attributes:
        any: True if any request asks for a change.
    """

    def __init__(self, rows: Sequence[SamplingRow], vocabulary: int, device: torch.device) -> None:
        self._vocabulary = vocabulary
        self._device = device
        self._grammars = [(index, row.grammar) for index, row in enumerate(rows) if row.grammar]
        self._allowed: list[tuple[int, Tensor]] = []
        self._restricted: list[tuple[int, SamplingRow]] = []
        self._processed: list[tuple[int, SamplingRow]] = []
        penalised: list[tuple[int, SamplingRow]] = []
        for place in enumerate(rows):
            index, row = place
            if row.params.allowed_token_ids is not None:
                self._allowed.append((index, self._within(row.params.allowed_token_ids)))
            if row.restricted:
                self._restricted.append(place)
            if row.params.logits_processors:
                self._processed.append(place)
            if row.penalised:
                penalised.append(place)
        self._bias = self._bias_of(rows)
        self._penalties = Penalties(penalised, vocabulary, device) if penalised else None
        listed = (self._grammars, self._allowed, self._restricted, self._processed, penalised)
        self.any = self._bias is not None or any(listed)

    def _bias_of(self, rows: Sequence[SamplingRow]) -> tuple[Tensor, Tensor] | None:
        """Return places in the logits as one flat tensor, and the numbers to add there."""
        biases: dict[int, float] = {}
        for index, row in enumerate(rows):
            for token, bias in row.params.logit_bias.items():
                if token < self._vocabulary:
                    biases[index * self._vocabulary + token] = bias
        if not biases:
            return None
        values = torch.tensor(list(biases.values()), dtype=torch.float32, device=self._device)
        return self._indices(list(biases)), values

    def append(self, index: int | None, token: int, slot: int) -> None:
        """Count a token that was appended to the output of a request.

        Args:
            index: row of the request; ``None`` for a request without a row in this batch.
            token: the appended one.
            slot: of the token in the request's ``TokenCounts``.
        """
        if self._penalties and index is not None:
            self._penalties.append(index, token, slot)

    def apply(self, logits: Tensor) -> dict[int, str]:
        """Change logits ``[n, vocabulary]`` float32 in place.

        Returns:
            By row, the reason for each row that cannot be sampled.
        """
        errors = self._allow(logits)
        for index, tokens in self._allowed:
            kept = logits[index, tokens]
            logits[index] = float("-inf")
            logits[index, tokens] = kept
        if self._restricted:
            logits.view(-1).index_fill_(0, self._indices(self._banned()), float("-inf"))
        if self._bias:
            logits.view(-1).index_add_(0, *self._bias)
        for index, row in self._processed:
            error = _process(logits[index], row)
            if error:
                errors[index] = error
        if self._penalties:
            self._penalties.apply(logits)
        return errors

    def _banned(self) -> list[int]:
        """Return the places of banned tokens, in the logits as one flat tensor."""
        banned = []
        for index, row in self._restricted:
            first = index * self._vocabulary
            banned += [first + token for token in row.banned() if token < self._vocabulary]
        return banned

    def _allow(self, logits: Tensor) -> dict[int, str]:
        """Ban the tokens that grammars do not allow, and tokens beyond a grammar's vocabulary.

        Returns:
            By row, the reason for each grammar that cannot go on.
        """
        errors: dict[int, str] = {}
        if not self._grammars:
            return errors
        masks = torch.zeros(len(self._grammars), -(-self._vocabulary // 32), dtype=torch.int32)
        for mask, (index, grammar) in zip(masks, self._grammars, strict=True):
            try:
                grammar.fill(mask)
            except RequestError as error:
                errors[index] = str(error)
        by_byte = _BANNED_BITS[masks.view(torch.uint8).int()]
        # A mask has whole words of 32 tokens.
        banned = by_byte.view(torch.bool)[:, : self._vocabulary]
        rows = [index for index, _ in self._grammars]
        if len(rows) == len(logits):
            logits.masked_fill_(banned.to(self._device), float("-inf"))
        else:
            at = self._indices(rows)
            logits[at] = logits[at].masked_fill_(banned.to(self._device), float("-inf"))
        return errors

    def _within(self, tokens: Sequence[int]) -> Tensor:
        return self._indices([token for token in tokens if token < self._vocabulary])

    def _indices(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _process(logits: Tensor, row: SamplingRow) -> str | None:
    """Let the processors of a request change its logits. Return an error, or ``None``."""
    for processor in row.params.logits_processors:
        name = f"{processor!r:.80}"
        try:
            result = processor(*_arguments(processor, row), logits.clone())
            if isinstance(result, Tensor) and result.shape == logits.shape:
                # Fails for a tensor without data, or of another layout.
                logits.copy_(result)
                continue
        # Code of users raises anything, and must not end other requests.
        except (Exception, SystemExit) as error:
            return f"its logits processor {name} raised {described(error)}"
        shape = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        expected = tuple(logits.shape)
        return f"its logits processor {name} returned {shape}, expected a tensor {expected}"
    return None


def _arguments(processor: Callable[..., Any], row: SamplingRow) -> tuple[list[int], ...]:
    """Return the arguments of a processor before the logits: the output, or prompt and output.

    A processor with three required parameters receives the prompt, too.

    Raises:
        TypeError: the processor requires an argument by name.
    """
    parameters = inspect.signature(processor).parameters.values()
    required = [each for each in parameters if each.default is each.empty]
    named = [each.name for each in required if each.kind is each.KEYWORD_ONLY]
    if named:
        raise TypeError(
            f"it has to have {', '.join(named)} by name, and is given the output and the logits "
            "alone: give that a default, or bind it by functools.partial"
        )
    # Lists of their own, because a processor may change its arguments.
    output = list(row.output)
    if len(required) == 3:
        return list(row.prompt), output
    return (output,)
