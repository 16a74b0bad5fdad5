"""Ranks of a job for benchmarks: processes of one thread each, on a processor of its own, that make the same calls."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

PROMPT = 32
"""Tokens of each prompt."""


class Ranks:
    """Processes that are one tensor group; ``state`` is theirs to keep things between calls.

    Args:
        size: their number.
    """

    def __init__(self, size: int) -> None:
        self._folder = TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, size, f"file://{Path(self._folder.name) / 'store'}")
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function of a module on every rank, with its state before the arguments; what each returned."""
        for end in self._ends:
            end.send((function, arguments))
        return [end.recv() for end in self._ends]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(30)
        self._folder.cleanup()


def _serve(end: Connection, rank: int, size: int, store: str) -> None:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    import torch

    torch.set_num_threads(1)
    from opgraft.distributed import destroy_distributed, init_distributed

    init_distributed(tensor=size, rank=rank, init_method=store)
    state: dict[str, Any] = {}
    while True:
        try:
            function, arguments = end.recv()
        except EOFError:
            break
        end.send(function(state, *arguments))
    state.clear()
    destroy_distributed()


@dataclass(frozen=True)
class Decoded:
    """The decoding of a batch, as one rank has it.

    Attributes:
        seconds: of the median step.
        own: of the median step without its collectives, where a rank waits for others, and so for whatever else runs.
        calls: of collectives in a step, by this rank.
        given: bytes that it gave to them.
        taken: seconds that it was in them, on average.
        waited: those of them in which it waited for the others.
    """

    seconds: float
    own: float
    calls: float
    given: float
    taken: float
    waited: float


@dataclass(frozen=True)
class Part:
    """The part of a model that a rank has.

    Attributes:
        weights: their bytes.
        key_heads: in a layer.
    """

    weights: int
    key_heads: int


def load(
    state: dict[str, Any], model: str, dtype: str, compilation: Mapping[str, Any] | None = None
) -> Part:
    """Make an engine, with settings of compilation; return the part of this rank."""
    from opgraft.config import (
        CacheConfig,
        CompilationConfig,
        LoadConfig,
        ModelConfig,
        OpgraftConfig,
    )
    from opgraft.engine.core import EngineCore
    from opgraft.ops.attention.decoder import attention_layers

    given = OpgraftConfig(
        model=ModelConfig(name=model, dtype=dtype, max_model_len=1024),
        cache=CacheConfig(memory_bytes=2**28),
        load=LoadConfig(progress=False),
        compilation_config=CompilationConfig(**(compilation or {})),
    )
    core = EngineCore(given)
    state.update(core=core, asked=0)
    executor: Any = core.executor
    model_of_rank = executor.worker.runner.model
    weights = sum(tensor.nbytes for tensor in model_of_rank.parameters())
    attention: Any = next(iter(attention_layers(model_of_rank).values()))
    return Part(weights, attention.num_kv_heads)


def read(state: dict[str, Any], size: int, rounds: int) -> float:
    """Return the bytes per second that this rank reads of so many, while the others do so too."""
    import torch
    from opgraft.distributed import get_tp_group

    del state
    weights, seconds = torch.ones(size // 4), []
    for _ in range(rounds):
        get_tp_group().all_reduce(torch.zeros(1))
        start = time.perf_counter()
        weights.sum()
        seconds.append(time.perf_counter() - start)
    return weights.nbytes / statistics.median(seconds)


def decode(state: dict[str, Any], batch: int, tokens: int) -> Decoded:
    """Answer prompts that were not asked before, and time the steps after those that compute prompts."""
    from opgraft.engine.request import Request
    from opgraft.engine.sampling_params import SamplingParams

    core, first = state["core"], state["asked"]
    state["asked"] += batch
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    requests = [
        Request(f"r{number}", _prompt(number), params) for number in range(first, first + batch)
    ]
    core.add(requests)
    core.step()
    before, seconds, own = _used(), [], []
    while core.has_work:
        taken, start = _used()[2], time.perf_counter()
        core.step()
        seconds.append(time.perf_counter() - start)
        own.append(seconds[-1] - _used()[2] + taken)
    used = [(now - then) / len(seconds) for now, then in zip(_used(), before, strict=True)]
    return Decoded(statistics.median(seconds), statistics.median(own), *used)


def left_out(state: dict[str, Any], batch: int, tokens: int) -> float:
    """Return the share of a step that a compiler of the model does not change: the plan of its layers, and what is
    around the model, the head included."""
    model = state["core"].executor.worker.runner.model
    plan, whole = _timed(model.model.plan, "run"), _timed(model, "forward")
    step = decode(state, batch, tokens).seconds
    del model.model.plan.run, model.forward
    return 1 - (statistics.median(whole) - statistics.median(plan)) / step


def _timed(owner: Any, name: str) -> list[float]:
    """Return a list that gets the seconds of each call of a method, until the attribute of that name is deleted."""
    method, seconds = getattr(owner, name), list[float]()

    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        result = method(*args)
        seconds.append(time.perf_counter() - start)
        return result

    setattr(owner, name, timed)
    return seconds


def _prompt(number: int) -> list[int]:
    return [100 + (number * 7 + place * 13) % 4000 for place in range(PROMPT)]


def _used() -> Sequence[float]:
    from opgraft.distributed import get_tp_group

    shared = getattr(get_tp_group().communicator, "shared", None)
    return (0, 0, 0.0, 0.0) if shared is None else shared.used()


def reduce(state: dict[str, Any], size: int, rounds: int) -> tuple[float, float]:
    """Return the seconds of a sum of so many bytes, by the communicator in use and by ``torch.distributed``."""
    import torch
    from opgraft.distributed import get_tp_group
    from opgraft.distributed.communicator import Communicator

    del state
    group, x = get_tp_group().communicator, torch.ones(size // 4)
    if group is None:
        raise SystemExit("a sum over ranks needs several of them")
    ways: tuple[Callable[[], object], ...] = (
        lambda: group.all_reduce(x),
        lambda: Communicator.all_reduce(group, x),
    )
    found: list[list[float]] = [[], []]
    for _ in range(rounds):
        for way, seconds in zip(ways, found, strict=True):
            way()
            for _ in range(5):
                start = time.perf_counter()
                way()
                seconds.append(time.perf_counter() - start)
    return statistics.median(found[0]), statistics.median(found[1])


def prefer(state: dict[str, Any], niceness: int) -> None:
    """Give this process a priority, if it may."""
    del state
    try:
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
    except PermissionError:
        return
