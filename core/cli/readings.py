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
_OP_SECONDS = "engine_op_seconds_total"
_KERNELS = "kernel_info"
_COUNTED = ("_total", "_count", "_sum", "_bucket")
"""Ends of the names of counters and of parts of histograms. None of them falls."""

_LABELS = {
    _RUNNING: {"engine", "model_name"},
    _STEP_SECONDS: {"engine", "part"},
    _OP_SECONDS: {"engine", "op"},
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
        total = 0.0
        for found, having, value in self.samples:
            if found == name and wanted <= having.items():
                total += value
        return total


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
        shares_of_ops: shares of the ops in the time of the model, the largest first. If no step of
            the interval has timed its ops, they are those since the start of the server.
        kernels: a row for each op that runs.
    """

    model: str
    seconds: float
    engines: list[EngineLoad]
    mean_seconds: dict[str, float | None]
    shares_of_step: dict[str, float]
    shares_of_ops: dict[str, float]
    kernels: list[RunningKernel]

    def to_dict(self) -> dict[str, Any]:
        """Return the load as plain data."""
        return asdict(self)


def load_between(former: Reading, present: Reading) -> Load:
    """Return the load from one reading of a server to the next."""
    change = _Change(former, present)
    seconds = present.moment - former.moment
    kernels = [
        RunningKernel(labels["op"], labels["kernel"], _provider(labels["provider"]))
        for labels in present.labels(_KERNELS)
    ]
    # Only some steps time their ops, and none of them may be in the interval.
    shares_of_ops = change.shares(_OP_SECONDS, "op")
    if not shares_of_ops:
        shares_of_ops = _Change(None, present).shares(_OP_SECONDS, "op")
    return Load(
        model=present.labels(_RUNNING)[0]["model_name"],
        seconds=seconds,
        engines=[change.of_engine(engine, seconds) for engine in present.engines],
        mean_seconds={word: change.mean(name) for word, name in _TIMES.items()},
        shares_of_step=change.shares(_STEP_SECONDS, "part"),
        shares_of_ops=shares_of_ops,
        kernels=kernels,
    )


class _Change:
    """Two readings of a server.

    Args:
        former: the first one; ``None`` for the time before the start of the server.
        present: the second one.
    """

    def __init__(self, former: Reading | None, present: Reading) -> None:
        self._present = present
        # A server that was started anew counts from 0: all of its counters, as means need two.
        is_new = former is None or _fell(former, present)
        self._former = None if is_new else former

    def grown(self, name: str, **labels: str) -> float:
        """Return the growth of a counter."""
        before = 0.0 if self._former is None else self._former.value(name, **labels)
        return self._present.value(name, **labels) - before

    def of_engine(self, engine: str, seconds: float) -> EngineLoad:
        """Return the load of an engine in so many seconds."""
        prompts = self.grown("prompt_tokens_total", engine=engine)
        outputs = self.grown("generation_tokens_total", engine=engine)
        present = self._present
        return EngineLoad(
            engine,
            present.value(_RUNNING, engine=engine),
            present.value("num_requests_waiting", engine=engine),
            present.value("kv_cache_usage_perc", engine=engine),
            prompts / seconds,
            outputs / seconds,
        )

    def mean(self, name: str) -> float | None:
        """Return the mean of the new observations of a histogram; ``None`` without any."""
        count = self.grown(f"{name}_count")
        if not count:
            return None
        return self.grown(f"{name}_sum") / count

    def shares(self, name: str, label: str) -> dict[str, float]:
        """Return the shares of the values of a label in a counter, the largest first.

        They are empty if the counter has not grown.
        """
        values = {labels[label] for labels in self._present.labels(name)}
        spent = {value: self.grown(name, **{label: value}) for value in values}
        whole = sum(spent.values())
        if not whole:
            return {}
        # Equal shares stay in one order.
        largest = sorted(values, key=lambda value: (-spent[value], value))
        return {value: spent[value] / whole for value in largest}


def _fell(former: Reading, present: Reading) -> bool:
    """Return True if a counter is lower than before, so that its server was started anew."""
    counts = {}
    for name, labels, value in former.samples:
        if name.endswith(_COUNTED):
            counts[_key_of(name, labels)] = value
    # Gauges are not among the counts, and no value is below 0.
    return any(
        value < counts.get(_key_of(name, labels), 0) for name, labels, value in present.samples
    )


def _key_of(name: str, labels: Mapping[str, str]) -> tuple[Any, ...]:
    """Return a key for a sample. Servers may write labels in any order."""
    return name, *sorted(labels.items())


def _provider(text: str) -> Provider:
    """Return the provider of a label, such as ``acme 1.0``."""
    name, _, version = text.partition(" ")
    return Provider(name, version or None)
