"""``Sampler``: from the logits of a step to its tokens."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Iterable, Mapping, Set
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

import torch
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.config import OpgraftConfig
from opgraft.engine.sampling.batch import SamplingBatch, SamplingPlan
from opgraft.engine.sampling.drawing import draw, draw_filtered
from opgraft.engine.sampling.greatest_values import row_maximum
from opgraft.engine.sampling.logprobs import TokenLogprobs, token_logprobs
from opgraft.errors import RequestError
from opgraft.platform import HOST
from opgraft.plugins.selection import current_platform
from torch import Tensor

IN_CACHE = 2**18
"""Logits to draw from at a time on a CPU. More leave the caches, and take three times as long."""


NO_NUMBERS = (
    "numbers overflowed, or weights are damaged. Try the dtype float32, or see to the checkpoint"
)


@dataclass(frozen=True)
class SampledTokens:
    """Tokens of a step, log-probabilities and failures.

    Attributes:
        tokens: ``[n]``, int64; -1 in a failed row. On the device of the logits, or on the host if
            that device computes no float64.
        logprobs: by key of the request, if asked for.
        errors: by key, the reason for each failed row.
        refused: keys of requests with a reason of their own, such as a grammar.
    """

    tokens: Tensor
    logprobs: Mapping[Hashable, TokenLogprobs] = dataclasses.field(default_factory=dict)
    errors: Mapping[Hashable, str] = dataclasses.field(default_factory=dict)
    refused: Set[Hashable] = frozenset()


@PluggableClass.register("sampler")
class Sampler(PluggableClass):
    """Samples a token for each request of a batch.

    Logits are changed in the order of vLLM:

    1. Tokens are banned: by grammars, by allowed tokens, by bad words and by ``min_tokens``.
    2. Biases are added, processors of users called, and penalties taken off.
    3. Greedy requests take the likeliest token. For others, logits are divided by the temperature,
       filtered by min-p, top-k and top-p, and a token is drawn.

    Probabilities are added up in float64. Logits of a device without float64 go to the host first.

    Args:
        opgraft_config: all settings, for subclasses; by default the built-in ones.
    """

    def __init__(self, opgraft_config: OpgraftConfig | None = None) -> None:
        self.opgraft_config = (opgraft_config or OpgraftConfig()).resolved()
        self._computes_float64 = functools.cache(_computes_float64)

    @torch.inference_mode()
    def __call__(self, logits: Tensor, batch: SamplingBatch) -> SampledTokens:
        """Sample a token for each row of the logits.

        Args:
            logits: ``[n, vocabulary]``, of any floating dtype; not changed.
            batch: with a request for each row.

        Raises:
            RequestError: the batch has another number of rows.
        """
        if logits.dim() != 2 or len(logits) != len(batch):
            shape = tuple(logits.shape)
            raise RequestError(
                f"logits {shape} for a batch of {len(batch)} requests: give [{len(batch)}, "
                "vocabulary], or select the requests that the rows stand for"
            )
        if not len(batch):
            return SampledTokens(torch.empty(0, dtype=torch.int64, device=logits.device))
        if not self._computes_float64(logits.device):
            logits = logits.to(HOST)
        return self._sample(logits, batch)

    def _sample(self, logits: Tensor, batch: SamplingBatch) -> SampledTokens:
        """Sample a token for each row of the logits, on their device."""
        plan = batch.plan(logits.shape[1], logits.device)
        working, own = _adjusted(logits, plan)
        maximum, tokens = self.likeliest(working)
        faults = _unusable(maximum, logits, working)
        errors = {row: fault.message for row, fault in faults.items()} | own
        if plan.drawn:
            if errors:
                # NaN would harm the drawing of other rows.
                working = _with_zeros(working, errors)
                maximum = _with_zeros(maximum, errors)
            drawn = _draw(working, maximum, plan, batch)
            tokens = drawn if plan.rows is None else tokens.index_copy_(0, plan.rows, drawn)
        result = _result(tokens, logits, plan, batch, errors)
        if not errors:
            return result
        of_request = own.keys() | {row for row, fault in faults.items() if fault.of_request}
        refused = {batch.keys[row] for row in of_request}
        return dataclasses.replace(result, refused=refused)

    def likeliest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the greatest logit of each row, float32, and its first token.

        The logit is NaN for a row with NaN. A subclass may search in another way.

        Args:
            logits: ``[n, vocabulary]``, of any floating dtype.
        """
        return row_maximum(logits.float())


def _adjusted(logits: Tensor, plan: SamplingPlan) -> tuple[Tensor, dict[int, str]]:
    """Return the logits to choose from, and row → error of the row's adjustments.

    Without drawn rows and adjustments, these are the caller's logits.
    """
    if not plan.adjustments.any:
        return logits.float() if plan.drawn else logits, {}
    working = logits.float()
    # float() returns logits of float32 themselves, and the caller's must not change.
    if working is logits:
        working = working.clone()
    return working, plan.adjustments.apply(working)


def _with_zeros(rows: Tensor, failed: Iterable[int]) -> Tensor:
    """Return a copy of some rows with zeros in failed rows."""
    numbers = torch.tensor(list(failed), device=rows.device)
    return rows.index_fill(0, numbers, 0.0)


def _computes_float64(device: torch.device) -> bool:
    """Return False if the platform says that its device has no float64."""
    if device.type == HOST:
        return True
    platform = current_platform()
    if platform.device_type != device.type:
        return True
    return platform.capability(device.index or 0).computes_float64


def _draw(logits: Tensor, maximum: Tensor, plan: SamplingPlan, batch: SamplingBatch) -> Tensor:
    """Draw tokens for the rows of ``plan.drawn``, in this order, a few rows at a time."""
    number = len(plan.drawn)
    noise_keys = batch.noise_keys(plan.drawn)
    keys = torch.tensor(noise_keys, dtype=torch.int64, device=logits.device).unsqueeze(1)
    few = max(1, IN_CACHE // logits.shape[1]) if logits.device.type == HOST else number
    tokens = []
    for begin, end in _ranges_of_rows(0, plan.num_unfiltered, few):
        scaled = _scaled(logits, maximum, plan, begin, end)
        tokens.append(draw(scaled, keys[begin:end]))
    for begin, end in _ranges_of_rows(plan.num_unfiltered, number, few):
        scaled = _scaled(logits, maximum, plan, begin, end)
        filters = plan.filters.take(slice(begin - plan.num_unfiltered, end - plan.num_unfiltered))
        tokens.append(draw_filtered(scaled, filters, keys[begin:end]))
    return torch.cat(tokens)


def _scaled(logits: Tensor, maximum: Tensor, plan: SamplingPlan, begin: int, end: int) -> Tensor:
    """Return logits less the greatest of the row, divided by the temperature, for drawn rows."""
    drawn = slice(begin, end)
    rows: slice | Tensor = drawn
    if plan.rows is not None:
        rows = plan.rows[drawn]
    greatest = maximum[rows].unsqueeze(1)
    below_greatest = logits[rows] - greatest
    return below_greatest.div_(plan.temperature[drawn])


def _ranges_of_rows(begin: int, end: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, end)) for start in range(begin, end, size)]


class _Fault(NamedTuple):
    """The reason for a row without a token, in the request or in the model."""

    message: str
    of_request: bool


def _unusable(maximum: Tensor, logits: Tensor, working: Tensor) -> dict[int, _Fault]:
    """Return the reason for each row that cannot be sampled: its greatest logit is not finite."""
    if all(map(isfinite, maximum.tolist())):
        return {}
    rows = (~maximum.isfinite()).nonzero().flatten().tolist()
    return {row: _reason(logits[row], working[row]) for row in rows}


def _reason(logits: Tensor, working: Tensor) -> _Fault:
    """Return the failure of a row.

    Args:
        logits: of the row, from the model.
        working: the same after the adjustments of the request.
    """
    where = f"of {len(logits)} logits"
    if bool(logits.isnan().any()):
        return _Fault(f"{int(logits.isnan().sum())} {where} are NaN: {NO_NUMBERS}", False)
    if bool(logits.isposinf().any()):
        return _Fault(f"{int(logits.isposinf().sum())} {where} are infinite: {NO_NUMBERS}", False)
    if bool(logits.isneginf().all()):
        reason = f"all {where} are -inf, so that the model allows no token: {NO_NUMBERS}"
        return _Fault(reason, False)
    if not bool(working.isneginf().all()):
        changed = int((~working.isfinite()).sum())
        reason = (
            f"what the request does to its logits made {changed} {where} NaN or infinite: see to "
            "its logits_processors"
        )
        return _Fault(reason, True)
    reason = (
        "no token is left: together, what the request bans, allows and processes leaves none to "
        "sample. Leave out one of bad_words, logit_bias, min_tokens, logits_processors and the "
        "structured output"
    )
    return _Fault(reason, True)


def _result(
    tokens: Tensor,
    logits: Tensor,
    plan: SamplingPlan,
    batch: SamplingBatch,
    errors: Mapping[int, str],
) -> SampledTokens:
    keys = batch.keys
    if errors:
        tokens[list(errors)] = -1
    wanted = [(row, count) for row, count in plan.logprobs if row not in errors]
    found: dict[Hashable, TokenLogprobs] = {}
    if wanted:
        rows = [row for row, _ in wanted]
        counts = [count for _, count in wanted]
        # Of the logits before adjustments, as the model gave them.
        given = token_logprobs(logits[rows], tokens[rows], counts)
        found = {keys[row]: logprobs for row, logprobs in zip(rows, given, strict=True)}
    return SampledTokens(tokens, found, {keys[row]: error for row, error in errors.items()})
