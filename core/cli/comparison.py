"""``opgraft run --compare``: the model without kernels and plugins' ops, beside the model with them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from opgraft.binding.names import op_name_of
from opgraft.cli.output import print_table
from opgraft.config import CompilationConfig, OpgraftConfig
from opgraft.plugins.discovery import discover
from opgraft.plugins.host import load_plugins
from opgraft.registry.state import host_state
from torch import Tensor

_ENOUGH = 1.0
"""Seconds that a measurement takes at least."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Measurement:
    """Numbers that a model computes for some texts, and its speed.

    Attributes:
        numbers: float32 ``[texts, n]``: logits of the first token of each answer, or embeddings.
        answers: of each text, its tokens or its nearest text.
        tokens: of the answers, or of the texts where these are embedded.
        seconds: median over the rounds.
    """

    numbers: Tensor
    answers: Sequence[object]
    tokens: int
    seconds: float

    def to_dict(self) -> dict[str, float]:
        """Return the speed as plain data."""
        return {"seconds": self.seconds, "tokens_per_second": self.tokens / self.seconds}


@dataclass(frozen=True)
class Comparison:
    """A model on native definitions, and as it is with kernels and plugins."""

    plain: Measurement
    grafted: Measurement

    @property
    def same_answers(self) -> bool:
        return self.plain.answers == self.grafted.answers

    @property
    def largest_difference(self) -> float:
        """The largest absolute difference of the numbers."""
        one, other = self.plain.numbers, self.grafted.numbers
        return (
            torch.where(one == other, 0, (one - other).abs()).max().item()
        )  # infinite ones may be equal

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain data."""
        return {
            "same_answers": self.same_answers,
            "largest_difference": self.largest_difference,
            "plain": self.plain.to_dict(),
            "grafted": self.grafted.to_dict(),
        }

    def print(self) -> None:
        """Print a row for each of the two."""
        compared = ("the same" if self.same_answers else "others", f"{self.largest_difference:.1e}")
        rows = [
            (name, f"{each.seconds:.2f} s", f"{each.tokens / each.seconds:.1f}", *more)
            for name, each, more in (
                ("plain", self.plain, ("", "")),
                ("grafted", self.grafted, compared),
            )
        ]
        print_table(("model", "time", "tokens per second", "answers", "difference"), rows)


def native_config() -> OpgraftConfig:
    """Return settings under which every op has its own class and runs its native definition."""
    load_plugins()
    state = host_state()
    targets = [replacement.target for replacement in state.active if replacement.target is not None]
    owners = {
        op_name_of(target, state): discover().provider_of(target.__module__).name
        for target in targets
    }
    return OpgraftConfig(
        compilation_config=CompilationConfig(custom_ops=["none"]),
        providers={name: owner for name, owner in owners.items() if name is not None},
    )


def timed(run: Callable[[], Result]) -> tuple[Result, float]:
    """Return a result, and the median of the seconds it took, over as many rounds as a second has."""
    seconds: list[float] = []
    while sum(seconds) < _ENOUGH:
        start = time.perf_counter()
        result = run()
        seconds.append(time.perf_counter() - start)
    return result, statistics.median(seconds)
