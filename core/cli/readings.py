"""Readings of a server's metrics, and the load in the time between two of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from opgraft.registry.decision import Provider

Sample: TypeAlias = tuple[str, Mapping[str, str], float]
"""A name, the labels and the value of a metric."""

_TIMES = {
    "first_token": "time_to_first_token_seconds",
    "between_tokens": "inter_token_latency_seconds",
    "request": "e2e_request_latency_seconds",
}
"""A time in words → the histogram."""

_STEP_SECONDS = "engine_step_seconds_total"
_RUNNING = "num_requests_running"
_KERNELS = "kernel_info"
_LABELS = {
    _RUNNING: {"engine", "model_name"},
    _STEP_SECONDS: {"engine", "part"},
    _KERNELS: {"op", "kernel", "provider"},
}
"""A metric → the labels that are read. Other programs have metrics of the same names."""


class Reading:
    """The metrics of a server at one moment.

    Attributes:
        moment: seconds of ``time.monotonic()``.
        samples: the metrics, with names without their prefix.
        engines: the numbers of the engines.

    Raises:
        ValueError: these are no metrics of opgraft's server.
    """

    def __init__(self, moment: float, samples: Iterable[Sample]) -> None:
        self.moment = moment
        self.samples = [
            (name.partition(":")[2], labels, value)
            for name, labels, value in samples
            # Metrics of the process have no prefix.
            if ":" in name
        ]
        for name, needed in _LABELS.items():
            for labels in self.labels(name):
                if not needed <= labels.keys():
                    raise ValueError(f"{name} lacks labels: {needed - labels.keys()}")
        self.engines = sorted((labels["engine"] for labels in self.labels(_RUNNING)), key=int)
        if not self.engines:
            raise ValueError(f"{_RUNNING} is missing")

    def labels(self, name: str) -> list[Mapping[str, str]]:
        """Return the labels of each sample of a name."""
        return [labels for found, labels, _ in self.samples if found == name]

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of a name that have these labels; 0 without any."""
        wanted = labels.items()
        return sum(
            value
            for found, having, value in self.samples
            if found == name and wanted <= having.items()
        )


@dataclass(frozen=True)
class EngineLoad:
    """The load of an engine.

    Attributes:
        engine: the number.
        running, waiting: sequences, at the second reading.
        cache_usage: share of the cache's blocks in use, 0 to 1, at the second reading.
        prompt_tokens_per_second: computed tokens of prompts.
        output_tokens_per_second: sampled tokens.
    """

    engine: str
    running: float
    waiting: float
    cache_usage: float
    prompt_tokens_per_second: float
    output_tokens_per_second: float


@dataclass(frozen=True)
class RunningKernel:
    """The kernel that an op of the model runs, with the provider of the kernel."""

    op: str
    kernel: str
    provider: Provider


@dataclass(frozen=True)
class Load:
    """The load of a server from one reading to the next.

    Attributes:
        model: the name for clients.
        seconds: from the first reading to the second.
        engines: a row for each engine.
        mean_seconds: means over requests and tokens of the interval; ``None`` without any.
        shares_of_step: shares of the parts in the time of all steps, the largest first; empty
            without a step.
        kernels: a row for each op that runs.
    """

    model: str
    seconds: float
    engines: list[EngineLoad]
    mean_seconds: dict[str, float | None]
    shares_of_step: dict[str, float]
    kernels: list[RunningKernel]

    def to_dict(self) -> dict[str, Any]:
        """Return the load as plain data."""
        return asdict(self)


def load_between(former: Reading, present: Reading) -> Load:
    """Return the load from one reading of a server to the next."""
    change = _Change(former, present)
    kernels = [
        RunningKernel(labels["op"], labels["kernel"], _provider(labels["provider"]))
        for labels in present.labels(_KERNELS)
    ]
    return Load(
        present.labels(_RUNNING)[0]["model_name"],
        change.seconds,
        [change.of_engine(engine) for engine in present.engines],
        {word: change.mean(name) for word, name in _TIMES.items()},
        change.shares_of_step(),
        kernels,
    )


class _Change:
    """Two readings of a server.

    Attributes:
        seconds: from the first one to the second.
    """

    def __init__(self, former: Reading, present: Reading) -> None:
        self._former = former
        self._present = present
        self.seconds = present.moment - former.moment

    def grown(self, name: str, **labels: str) -> float:
        """Return the growth of a counter."""
        before = self._former.value(name, **labels)
        now = self._present.value(name, **labels)
        # A server that was started anew counts from 0.
        return now if now < before else now - before

    def of_engine(self, engine: str) -> EngineLoad:
        """Return the load of an engine."""
        prompts = self.grown("prompt_tokens_total", engine=engine)
        outputs = self.grown("generation_tokens_total", engine=engine)
        present = self._present
        return EngineLoad(
            engine,
            present.value(_RUNNING, engine=engine),
            present.value("num_requests_waiting", engine=engine),
            present.value("kv_cache_usage_perc", engine=engine),
            prompts / self.seconds,
            outputs / self.seconds,
        )

    def mean(self, name: str) -> float | None:
        """Return the mean of the new observations of a histogram; ``None`` without any."""
        count = self.grown(f"{name}_count")
        if not count:
            return None
        return self.grown(f"{name}_sum") / count

    def shares_of_step(self) -> dict[str, float]:
        """Return the share of each part of a step, the largest first; empty without a step."""
        parts = {labels["part"] for labels in self._present.labels(_STEP_SECONDS)}
        spent = {part: self.grown(_STEP_SECONDS, part=part) for part in parts}
        whole = sum(spent.values())
        if not whole:
            return {}
        # Parts with equal times stay in one order.
        largest = sorted(parts, key=lambda part: (-spent[part], part))
        return {part: spent[part] / whole for part in largest}


def _provider(text: str) -> Provider:
    """Return the provider of a label, such as ``acme 1.0``."""
    name, _, version = text.partition(" ")
    return Provider(name, version or None)
