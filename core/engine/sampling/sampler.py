"""``Sampler``: from the logits of a step to its tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Set
from dataclasses import dataclass
from math import isfinite

import torch
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.config import OpgraftConfig
from opgraft.engine.sampling.batch import Plan, SamplingBatch
from opgraft.engine.sampling.drawing import draw, draw_filtered
from opgraft.engine.sampling.greatest_values import row_maximum
from opgraft.engine.sampling.logprobs import TokenLogprobs, token_logprobs
from opgraft.errors import RequestError
from opgraft.platform import HOST
from torch import Tensor

IN_CACHE = 2**18
"""Logits that are drawn from at a time on a CPU: more take three times as long, in memory that is fetched anew."""


NO_NUMBERS = (
    "numbers overflowed, or weights are damaged. Try the dtype float32, or see to the checkpoint"
)


@dataclass(frozen=True)
class Sampled:
    """Tokens of a step, log-probabilities and failures.

    Attributes:
        tokens: ``[n]``, int64, on the logits' device; -1 in a row that failed.
        logprobs: by key, of the requests that ask for them.
        errors: by key, why a request could not be sampled.
        refused: keys of those whose own grammar or processor is the reason.
    """

    tokens: Tensor
    logprobs: Mapping[Hashable, TokenLogprobs] = dataclasses.field(default_factory=dict)
    errors: Mapping[Hashable, str] = dataclasses.field(default_factory=dict)
    refused: Set[Hashable] = frozenset()


@PluggableClass.register("sampler")
class Sampler(PluggableClass):
    """Samples a token for each request of a batch.

    Logits are changed in the order of vLLM: allowed tokens, bad words and tokens that ``min_tokens`` holds back are
    banned, then come biases, users' processors and penalties. Greedy requests take the likeliest token of that. For
    the others the logits are divided by the temperature, limited by min-p, top-k and top-p, and drawn from.

    Args:
        opgraft_config: all settings, for subclasses; the built-in defaults if not given.
    """

    def __init__(self, opgraft_config: OpgraftConfig | None = None) -> None:
        self.opgraft_config = (opgraft_config or OpgraftConfig()).resolved()

    @torch.inference_mode()
    def __call__(self, logits: Tensor, batch: SamplingBatch) -> Sampled:
        """Sample.

        Args:
            logits: ``[n, vocabulary]``, of any floating dtype; left as they are.
            batch: its rows are those of the logits.

        Raises:
            RequestError: the batch has another number of rows.
        """
        if logits.dim() != 2 or len(logits) != len(batch):
            shape = tuple(logits.shape)
            raise RequestError(
                f"logits {shape} for a batch of {len(batch)} requests: give [{len(batch)}, vocabulary], or select the "
                "requests that the rows stand for"
            )
        if not len(batch):
            return Sampled(torch.empty(0, dtype=torch.int64, device=logits.device))
        plan = batch.plan(logits.shape[1], logits.device)
        working = logits.float() if plan.drawn or plan.adjustments.any else logits
        own: dict[int, str] = {}
        if plan.adjustments.any:
            working = working.clone() if working is logits else working
            own = plan.adjustments.apply(working)
        maximum, tokens = self.likeliest(working)
        errors = _unusable(maximum, logits, working) | own
        if plan.drawn:
            if errors:  # numbers that harm no other row
                failed = torch.tensor(list(errors), device=logits.device)
                working, maximum = (
                    working.index_fill(0, failed, 0.0),
                    maximum.index_fill(0, failed, 0.0),
                )
            drawn = _draw(working, maximum, plan, batch)
            tokens = drawn if plan.rows is None else tokens.index_copy_(0, plan.rows, drawn)
        result = _result(tokens, logits, plan, batch, errors)
        return (
            dataclasses.replace(result, refused=frozenset(batch.keys[row] for row in own))
            if own
            else result
        )

    def likeliest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the greatest logit of each row, float32, and the first token that has it; NaN for a row with NaN.

        A subclass may find them in another way.

        Args:
            logits: ``[n, vocabulary]``, of any floating dtype.
        """
        return row_maximum(logits.float())


def _draw(logits: Tensor, maximum: Tensor, plan: Plan, batch: SamplingBatch) -> Tensor:
    """Draw tokens for the rows that are not greedy, in the order of the plan, a few rows at a time."""
    keys = torch.tensor(
        batch.noise_keys(plan.drawn), dtype=torch.int64, device=logits.device
    ).unsqueeze(1)
    few = max(1, IN_CACHE // logits.shape[1]) if logits.device.type == HOST else len(plan.drawn)
    tokens = []
    for begin, end in (*_parts(0, plan.free, few), *_parts(plan.free, len(plan.drawn), few)):
        rows: slice | Tensor = slice(begin, end) if plan.rows is None else plan.rows[begin:end]
        scaled = (logits[rows] - maximum[rows].unsqueeze(1)).div_(plan.temperature[begin:end])
        if begin < plan.free:
            tokens.append(draw(scaled, keys[begin:end]))
        else:
            filters = plan.filters.take(slice(begin - plan.free, end - plan.free))
            tokens.append(draw_filtered(scaled, filters, keys[begin:end]))
    return torch.cat(tokens)


def _parts(begin: int, end: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, end)) for start in range(begin, end, size)]


def _unusable(maximum: Tensor, logits: Tensor, working: Tensor) -> dict[int, str]:
    """Say by row why nothing can be sampled, where the greatest logit is no number."""
    if all(map(isfinite, maximum.tolist())):
        return {}
    return {
        row: _reason(logits[row], working[row])
        for row in (~maximum.isfinite()).nonzero().flatten().tolist()
    }


def _reason(logits: Tensor, working: Tensor) -> str:
    where = f"of {len(logits)} logits"
    if bool(logits.isnan().any()):
        return f"{int(logits.isnan().sum())} {where} are NaN: {NO_NUMBERS}"
    if bool(logits.isposinf().any()):
        return f"{int(logits.isposinf().sum())} {where} are infinite: {NO_NUMBERS}"
    if bool(logits.isneginf().all()):
        return f"all {where} are -inf, so that the model allows no token: {NO_NUMBERS}"
    if not bool(working.isneginf().all()):
        return (
            f"what the request does to its logits made {int((~working.isfinite()).sum())} {where} NaN or infinite: "
            "see to its logits_processors"
        )
    return (
        "no token is left: together, what the request bans, allows and processes leaves none to sample. Leave out one "
        "of bad_words, logit_bias, min_tokens, logits_processors and the structured output"
    )


def _result(
    tokens: Tensor, logits: Tensor, plan: Plan, batch: SamplingBatch, errors: Mapping[int, str]
) -> Sampled:
    keys = batch.keys
    if errors:
        tokens[list(errors)] = -1
    wanted = [(row, count) for row, count in plan.logprobs if row not in errors]
    found: dict[Hashable, TokenLogprobs] = {}
    if wanted:
        rows = [row for row, _ in wanted]
        given = token_logprobs(logits[rows], tokens[rows], [count for _, count in wanted])
        found = {keys[row]: logprobs for row, logprobs in zip(rows, given, strict=True)}
    return Sampled(tokens, found, {keys[row]: error for row, error in errors.items()})
