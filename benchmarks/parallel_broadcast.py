"""The price of workers in processes of their own: the way of a step to them, its cost, and their start."""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from engine_rows import Finding, print_findings
from opgraft import LLM, SamplingParams
from opgraft.engine.step import NewSequence, ScheduledPart, Step, step_of
from opgraft.engine.workers.remote_executor import encoded_step
from opgraft.engine.workers.worker_link import EXECUTE_PARTS
from opgraft.machine.channel import Channel, PipeSender, encoded
from timing import machine

WORKERS = 4
MOST_MICROSECONDS = 150
"""Until the last worker has a step."""

STEPS = 100
TOKENS = 32
"""Of an answer."""
LENGTH_BYTES = 8
END = "end"
"""The call that ends a worker."""


def decoding(requests: int) -> Step:
    """Return a step in which each of some requests computes a token, and one in 32 has a new block."""
    blocks = [((number,),) if number % 32 == 0 else ((),) for number in range(requests)]
    return Step(
        (),
        (),
        (),
        tuple(ScheduledPart(f"request-{i}", 100, 1, blocks[i], True) for i in range(requests)),
    )


def prompted(tokens: int) -> Step:
    """Return a step that begins a prompt."""
    new = NewSequence(
        "new",
        tuple(range(tokens)),
        tokens,
        tokens,
        SamplingParams(),
        (tuple(range(tokens // 32 + 1)),),
        0,
    )
    return Step((), (new,), (), (ScheduledPart("new", 0, tokens, ((),), True),))


STEPS_OF = {
    "batch 8": partial(decoding, 8),
    "batch 64": partial(decoding, 64),
    "a prompt of 2,048": partial(prompted, 2048),
}


def _encoded(step: Step | None) -> memoryview:
    """Return a step as the executor sends it; ``None`` ends a worker."""
    return encoded((END, (), False)) if step is None else encoded_step(step)


class Sockets:
    """A message is written to a socket of each worker."""

    def __init__(self) -> None:
        pairs = [socket.socketpair() for _ in range(WORKERS)]
        self.ours = [Channel(ours) for ours, _ in pairs]
        self.theirs = [Channel(theirs) for _, theirs in pairs]

    def send(self, number: int, step: Step | None) -> None:
        data = _encoded(step)
        for channel in self.ours:
            channel.send_encoded(data)


class Pipes:
    """A message is written to a pipe of each worker: as the executor does."""

    def __init__(self) -> None:
        pairs = [(os.pipe(), socket.socketpair()) for _ in range(WORKERS)]
        # Nothing comes by the sockets.
        self.ours = [PipeSender(ours, pipe) for (_, pipe), (ours, _) in pairs]
        self.theirs = [Channel(theirs, pipe=pipe) for (pipe, _), (_, theirs) in pairs]

    def send(self, number: int, step: Step | None) -> None:
        data = _encoded(step)
        for channel in self.ours:
            channel.send_encoded(data)


class Woken:
    """A worker that is told to go on, and nothing else."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def receive(self) -> Any:
        return ("execute" if os.read(self.tokens, 1) == b"g" else END), ()


class Wakes:
    """Nothing but a byte goes to each worker: the least that waking them takes."""

    def __init__(self) -> None:
        pipes = [os.pipe() for _ in range(WORKERS)]
        self.tokens = [token for _, token in pipes]
        self.theirs = [Woken(tokens) for tokens, _ in pipes]

    def send(self, number: int, step: Step | None) -> None:
        for each in self.tokens:
            os.write(each, b"g" if step else b"e")


def _worker(way: Sockets | Pipes | Wakes, worker: int, told: socket.socket) -> None:
    while True:
        method, arguments = way.theirs[worker].receive()[:2]
        if method == END:
            os._exit(0)
        if method == EXECUTE_PARTS:  # as the worker does
            step_of(*arguments)
        told.sendall(time.perf_counter_ns().to_bytes(LENGTH_BYTES, "little"))


def _measured(way: Sockets | Pipes | Wakes, make: Callable[[], Step]) -> list[tuple[float, float]]:
    """Return, for each of some steps, the microseconds until it was sent, and until the last worker had it."""
    tellers = [socket.socketpair() for _ in range(WORKERS)]
    for worker, (_, told) in enumerate(tellers):
        if os.fork() == 0:
            _worker(way, worker, told)
    found = []
    for number in range(STEPS):
        step = make()  # just before it is sent, as the engine does
        started = time.perf_counter_ns()
        way.send(number, step)
        sent = time.perf_counter_ns()
        had = max(int.from_bytes(ours.recv(LENGTH_BYTES), "little") for ours, _ in tellers)
        found.append(((sent - started) / 1e3, (had - started) / 1e3))
        # As a step is computed meanwhile, and workers sleep when the next one comes.
        time.sleep(0.002)
    way.send(STEPS, None)
    for _ in tellers:
        os.wait()
    return found


def broadcast(arguments: argparse.Namespace) -> Iterator[Finding]:
    """Compare two ways of a step to four workers, by when the last has it. The bound is that of a byte to each.

    The engine's own time for a step, which makes it and looks after its workers, is not in it.
    """
    for name, make in STEPS_OF.items():
        found: dict[type, list[tuple[float, float]]] = {Pipes: [], Sockets: [], Wakes: []}
        for _ in range(arguments.rounds):
            for way, rows in found.items():
                rows += _measured(way(), make)
        medians = {
            way: [statistics.median(side) for side in zip(*rows, strict=True)]
            for way, rows in found.items()
        }
        bound = medians[Wakes][1]
        for way in (Pipes, Sockets):
            sent, had = medians[way]
            detail = f"{sent:,.0f} us to send it, {bound:,.0f} us for a single byte; "
            detail += f"{WORKERS} workers on {os.cpu_count()} processors"
            most = MOST_MICROSECONDS if way is Pipes else None
            yield Finding(
                f"us until all workers have a step, {name}, {way.__name__}",
                had,
                detail,
                most=most,
                bound=bound,
            )


def overhead(arguments: argparse.Namespace) -> Iterator[Finding]:
    """Compare the time of steps in a process of their own with that of steps in this one."""
    pairs = _steps_in_turns(
        arguments, {"parallel.executor": "processes"}, {"parallel.executor": "in_process"}
    )
    yield _over("worker in its own process / in the engine's, batch 8", pairs, most=1.05)


def ray(arguments: argparse.Namespace) -> Iterator[Finding]:
    """Compare the throughput of two ranks that Ray has placed with that of two processes, which are the same but there.

    Ray is started here, with workers of the usual priority: by default they have the niceness 15.
    """
    os.environ |= {"RAY_ADDRESS": "local", "RAY_worker_niceness": "0"}
    pairs = _steps_in_turns(arguments, _sizes(2), {**_sizes(2), "parallel.executor": "ray"})
    yield _over("throughput of two ranks, Ray over processes, batch 8", pairs, least=0.97)


def _steps_in_turns(
    arguments: argparse.Namespace, *sides: dict[str, Any]
) -> list[tuple[float, ...]]:
    """Return the seconds of a step of engines with some settings, which answer in turns, for each round."""
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(range(3, 19))}] * 8
    engines = [_opened(arguments, **settings) for settings in sides]
    found = []
    for number in range(2 * arguments.rounds + 1):
        turn = 1 if number % 2 else -1
        seconds = [
            _seconds(partial(llm.generate, prompts, params)) / TOKENS for llm in engines[::turn]
        ]
        found.append(tuple(seconds[::turn]))
    for llm in engines:
        llm.shutdown()
    return found[1:]


def _over(name: str, pairs: Sequence[tuple[float, ...]], **target: float) -> Finding:
    ours, theirs = (statistics.median(side) * 1e3 for side in zip(*pairs, strict=True))
    detail = f"{ours:.2f} over {theirs:.2f} ms a step, {len(pairs)} rounds"
    return Finding(name, statistics.median(a / b for a, b in pairs), detail, **target)


def _opened_and_shut(arguments: argparse.Namespace, ranks: int) -> None:
    _opened(arguments, **_sizes(ranks)).shutdown()


def start(arguments: argparse.Namespace) -> Iterator[Finding]:
    """Compare the start of two workers with that of one."""
    pairs = []
    for _ in range(arguments.rounds):
        pairs.append([_seconds(partial(_opened_and_shut, arguments, ranks)) for ranks in (2, 1)])
    two, one = (statistics.median(side) for side in zip(*pairs, strict=True))
    value = statistics.median(a / b for a, b in pairs)
    yield Finding("start of two workers over one", value, f"{two:.1f} over {one:.1f} s", most=1.25)


def _sizes(ranks: int) -> dict[str, Any]:
    return {"parallel.tensor": ranks, "parallel.executor": "processes"}


def _opened(arguments: argparse.Namespace, **settings: Any) -> LLM:
    return LLM(arguments.model, **{"load.progress": False, "cache.num_blocks": 300, **settings})


def _seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Finding]]] = {
    "broadcast": broadcast,
    "overhead": overhead,
    "ray": ray,
    "start": start,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    findings = [finding for part in arguments.rows for finding in PARTS[part](arguments)]
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print_findings(findings)


if __name__ == "__main__":
    main()
