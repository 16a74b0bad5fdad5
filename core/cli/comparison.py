"""``opgraft run --compare``: a model on native definitions beside the model as usual."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from opgraft.binding.names import op_name_of
from opgraft.cli.output import print_table
from opgraft.config import CompilationConfig, OpgraftConfig
from opgraft.plugins.discovery import discover
from opgraft.plugins.host import load_plugins
from opgraft.registry.state import host_state
from torch import Tensor

_ENOUGH = 1.0
"""The least seconds of a measurement."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Measurement:
    """The numbers of a model for some texts, and the speed.

    Attributes:
        numbers: float32 ``[texts, n]``: logits of the first token of each answer, or embeddings.
        answers: the tokens for each text, or the nearest text.
        tokens: the number in all answers, or in the embedded texts.
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
class ModelComparison:
    """A model on native definitions, and as it is with kernels and plugins."""

    plain: Measurement
    grafted: Measurement

    @property
    def same_answers(self) -> bool:
        return self.plain.answers == self.grafted.answers

    @property
    def largest_difference(self) -> float:
        """The largest absolute difference of the numbers."""
        one = self.plain.numbers
        other = self.grafted.numbers
        # Infinite numbers may be equal, and their difference is NaN.
        differences = (one - other).abs().masked_fill(one == other, 0)
        return differences.max().item()

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
        answers = "the same" if self.same_answers else "others"
        difference = f"{self.largest_difference:.1e}"
        rows = [
            ("plain", *_speed_in_words(self.plain), "", ""),
            ("grafted", *_speed_in_words(self.grafted), answers, difference),
        ]
        print_table(("model", "time", "tokens per second", "answers", "difference"), rows)


def _speed_in_words(of: Measurement) -> tuple[str, str]:
    return f"{of.seconds:.2f} s", f"{of.tokens / of.seconds:.1f}"


def native_config() -> OpgraftConfig:
    """Return settings for native definitions in the ops' own classes."""
    load_plugins()
    state = host_state()
    owners = {}
    # custom_ops chooses kernels, and a replaced class would still be constructed.
    for replacement in state.active:
        target = replacement.target
        name = None if target is None else op_name_of(target, state)
        if target is not None and name is not None:
            owners[name] = discover().provider_of(target.__module__).name
    compilation = CompilationConfig(custom_ops=["none"])
    return OpgraftConfig(compilation_config=compilation, providers=owners)


def timed(run: Callable[[], Result]) -> tuple[Result, float]:
    """Return a result and the median seconds of a round, for as many rounds as a second takes."""
    seconds: list[float] = []
    while sum(seconds) < _ENOUGH:
        start = time.perf_counter()
        result = run()
        seconds.append(time.perf_counter() - start)
    return result, statistics.median(seconds)
