"""Running engines: each a process in an environment of its own, which loads its checkpoint once and answers tasks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from engine_tasks import ENGINES, PARTS, TASKS, Engine, Part

PEERS = Path(__file__).parent / "peers"
sys.path.append(str(PEERS))
from checkpoints import packaged, write_gguf, write_safetensors  # noqa: E402  # a script's folder is not a package

SETTLING = 0.2
"""Seconds until a new process has started to compute."""

Key = tuple[str, str]
"""An engine's name and a dtype."""


@dataclass
class Record:
    """The measurements of an engine in a dtype.

    Attributes:
        version: of its package.
        starts: seconds from its start to its first token, by clock, for each start.
        answers: what it told of each round of a task.
    """

    version: str
    starts: list[Mapping[str, float]] = field(default_factory=list)
    answers: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)

    def seconds(self, task: str, clock: str) -> list[float]:
        """Return what each round of a task took."""
        return [answer[clock] for answer in self.answers[task]]

    @property
    def peak_bytes(self) -> int:
        """Return the most memory that it has held."""
        return max(
            int(answer["peak_bytes"]) for answers in self.answers.values() for answer in answers
        )


class Side:
    """A running engine.

    Args:
        name: of the engine.
        dtype: of its weights.
        python: that runs it.
        checkpoint: that it loads.
    """

    def __init__(self, name: str, dtype: str, python: str, checkpoint: Path) -> None:
        self.name, self.dtype = name, dtype
        engine = ENGINES[name]
        started = time.perf_counter()
        self.process = subprocess.Popen(  # our own scripts
            [python, str(PEERS / engine.script), str(checkpoint), dtype],
            env={**os.environ, "HF_HUB_OFFLINE": "1", **engine.variables},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.version: str = json.loads(self._line())["version"]
        first = self.ask([[100, 200, 300]], 1)
        self.start = {
            "seconds": time.perf_counter() - started,
            "cpu_seconds": first["all_cpu_seconds"],
        }

    def _line(self) -> str:
        line = self.process.stdout.readline().strip() if self.process.stdout else ""
        if not line:
            raise RuntimeError(f"{self.name} in {self.dtype} ended: see its messages above")
        return line

    def ask(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """Have prompts answered."""
        if self.process.stdin is not None:
            self.process.stdin.write(
                json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n"
            )
            self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._line())
        return answer

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()


@contextmanager
def _busy_process() -> Iterator[None]:
    """Run another process, which computes until this context ends."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(SETTLING)
        yield
    finally:
        process.kill()
        process.wait()


def checkpoint_of(engine: Engine, dtype: str, folder: Path) -> Path:
    """Return the checkpoint that an engine loads, written where that has not been done."""
    if engine.checkpoint == "packaged":
        return packaged()
    write = write_gguf if engine.checkpoint == "gguf" else write_safetensors
    return write(folder, getattr(torch, dtype))


def converted(format_: str, python: str, source: Path, dtype: str) -> Path:
    """Return the checkpoint in another format, written by the engine's own tools; done once."""
    target = source.with_name(f"{format_}-{dtype}")
    if not target.is_dir():
        partial = target.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)  # of a conversion that was cut short
        command = [python, str(PEERS / "convert.py"), format_, str(source), str(partial), dtype]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        subprocess.run(command, env=environment, stdout=sys.stderr, check=True)  # our own script
        partial.rename(target)
    return target


def pythons(left_out: list[str], engines: Iterable[str]) -> dict[str | None, str]:
    """Return the Python of each environment of the engines; those that cannot be had are added to ``left_out``."""
    found: dict[str | None, str] = {None: sys.executable}
    for name in dict.fromkeys(
        environment for each in engines if (environment := ENGINES[each].environment)
    ):
        if given := os.environ.get(f"BENCH_{name.upper()}"):
            found[name] = given
            continue
        command = ["bash", str(PEERS / "environment.sh"), name]
        # Our own script.
        built = subprocess.run(command, text=True, stdout=subprocess.PIPE, check=False)
        if built.returncode:
            left_out.append(f"{name}: its environment cannot be built, see the messages above")
        else:
            found[name] = built.stdout.strip()
    return found


@dataclass(frozen=True)
class Rounds:
    """The numbers of times that tasks are done.

    Attributes:
        usual: rounds of a task, after one that warms up.
        many: rounds of a task of many requests, which needs no warming up.
    """

    usual: int = 5
    many: int = 2

    def includes(self, engine: str, task: str, turn: int) -> bool:
        """Tell whether an engine does a task in a turn; turn 0 warms up and is not counted."""
        if TASKS[task].many:
            return 0 < turn <= (1 if ENGINES[engine].once else self.many)
        return turn <= self.usual


class Bench:
    """All sides of a run, started when first asked and kept until it ends.

    Args:
        found: environment to its Python.
        folder: of the checkpoints.
        engines: names of those that take part; an engine whose environment is not there takes none.
        rounds: of the tasks.
    """

    def __init__(
        self, found: Mapping[str | None, str], folder: Path, engines: Iterable[str], rounds: Rounds
    ) -> None:
        self.found, self.folder, self.rounds = found, folder, rounds
        self.engines = [name for name in engines if ENGINES[name].environment in found]
        self.records: dict[Key, Record] = {}

    def measure(self, dtype: str, parts: Iterable[str]) -> Iterator[str]:
        """Measure parts in a dtype, and yield the name of each when it is done."""
        with self._sides(dtype) as sides:
            for name in parts:
                part = PARTS[name]
                chosen = [
                    each
                    for each in part.engines
                    if each in self.engines and dtype in ENGINES[each].dtypes
                ]
                if part.starts:
                    self._time_starts(chosen, dtype)
                else:
                    self._take_turns(part, [sides(each) for each in chosen])
                yield name

    @contextmanager
    def _sides(self, dtype: str) -> Iterator[Any]:
        with ExitStack() as stack:
            running: dict[str, Side] = {}

            def side(name: str) -> Side:
                if name not in running:
                    running[name] = stack.enter_context(self._started(name, dtype))
                return running[name]

            yield side

    def _started(self, name: str, dtype: str) -> Side:
        engine = ENGINES[name]
        python = self.found[engine.environment]
        checkpoint = checkpoint_of(engine, dtype, self.folder)
        if engine.converted:
            checkpoint = converted(engine.converted, python, checkpoint, dtype)
        return Side(name, dtype, python, checkpoint)

    def _record(self, side: Side) -> Record:
        return self.records.setdefault((side.name, side.dtype), Record(side.version))

    def _time_starts(self, names: list[str], dtype: str) -> None:
        for _ in range(self.rounds.many):
            for name in names:
                with self._started(name, dtype):
                    pass  # so that each finds in memory what it reads, and memory of its own as it gave it back
                with self._started(name, dtype) as side:
                    self._record(side).starts.append(side.start)

    def _take_turns(self, part: Part, sides: list[Side]) -> None:
        for turn in range(self.rounds.usual + 1):
            for repeat in range(part.repeats):
                counts = turn > 0 and (repeat > 0 or part.repeats == 1)
                for side in sides[:: 1 if (turn + repeat) % 2 == 0 else -1]:
                    self._take_turn(part, side, turn, counts)

    def _take_turn(self, part: Part, side: Side, turn: int, counts: bool) -> None:
        for task in part.tasks:
            if self.rounds.includes(side.name, task, turn):
                with _busy_process() if TASKS[task].beside else nullcontext():
                    answer = side.ask(TASKS[task].prompts(task, turn), TASKS[task].max_tokens)
                if counts:
                    self._record(side).answers.setdefault(task, []).append(answer)
