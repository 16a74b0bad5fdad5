"""Run parts one after another: each is a process with a time limit, and none can take the others down.

This module imports no torch: what breaks the CUDA of a part does not reach it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from on_gpu.rows import FAILED, MEASURED, NO_DEVICE, PASSED, Row, read_rows

POLL = 0.1  # seconds between two looks at a running part
REPORT_EVERY = 2.0  # seconds between two reports while a part runs
LEAST_TIME = 5.0
"""Seconds below which a part is not started: it takes longer to import torch."""

TO_END = 8.0
"""Seconds before the end of the run at which the last part is killed: 3 to kill, the rest to report."""

TO_KILL = 2.0
"""Seconds to wait for a process that was killed."""

PR_SET_CHILD_SUBREAPER = 36
OUT_OF_TIME, NOT_STARTED, RUNNING = "out of time", "not started", "running"
FILLED_DISK = "it filled the disk"


@dataclass(frozen=True)
class Part:
    """A part of the run.

    Attributes:
        name: of its module, which has a function ``run``.
        title: what it shows, in a few words.
        seconds: it may take.
        package: of its module.
    """

    name: str
    title: str
    seconds: float
    package: str = "on_gpu.parts"


@dataclass
class Result:
    """The outcome of a part.

    Attributes:
        part: that was run.
        outcome: as of a row; or out of time, or not started.
        reason: why it failed or was not started.
        seconds: that it took.
        limit: seconds that it was given.
        rows: that it reported.
        log: the file of what it printed.
    """

    part: Part
    outcome: str = NOT_STARTED
    reason: str = ""
    seconds: float = 0.0
    limit: float = 0.0
    rows: Sequence[Row] = field(default_factory=list)
    log: Path | None = None

    def count(self, outcome: str) -> int:
        """Count the rows of an outcome."""
        return sum(row.outcome == outcome for row in self.rows)


@dataclass(frozen=True)
class Limits:
    """Limits of time and disk.

    Attributes:
        seconds: of the whole run.
        reserve: bytes of the disk that are kept free; a part that leaves less is killed, and what it wrote is deleted.
        started: when the run began, by ``time.monotonic``; by default when the runner is made.
    """

    seconds: float = 480.0
    reserve: int = 1 << 30
    started: float | None = None


class Runner:
    """Runs parts.

    Args:
        folder: for temporary files, on the disk that is watched; each part has a folder of its own below it.
        bundle: the folder that parts read.
        limits: of time and disk.
        environment: of the processes.
        report: called with all results whenever there is news.
    """

    def __init__(
        self,
        folder: Path,
        bundle: Path,
        limits: Limits,
        environment: Mapping[str, str],
        report: Callable[[Sequence[Result]], None],
    ) -> None:
        self._folder = folder
        self._bundle = bundle
        self._limits = limits
        self._environment = environment
        self._report = report
        started = time.monotonic() if limits.started is None else limits.started
        self._end = started + limits.seconds - TO_END
        _adopt_orphans()

    def run(self, parts: Sequence[Part]) -> list[Result]:
        """Run parts in their order, and return their results in that order."""
        results = [Result(part) for part in parts]
        for result in results:
            self._report(results)
            self._run(result, lambda: self._report(results))
            print(f"==> {result.part.name}: {result.outcome} {result.reason}".rstrip(), flush=True)
            self._report(results)
        return results

    def _run(self, result: Result, report: Callable[[], None]) -> None:
        limit = result.limit = min(result.part.seconds, self._end - time.monotonic())
        if limit < LEAST_TIME and limit < result.part.seconds:
            result.reason = "no time was left"
            return
        result.outcome = RUNNING
        place = self._folder / result.part.name
        try:
            place.mkdir(parents=True)
            self._run_in(place, result, report)
        except OSError as error:  # such as a disk that is full
            result.outcome, result.reason = FAILED, f"could not be run: {error}"
        finally:
            kill_children()
            shutil.rmtree(place / "temporary", ignore_errors=True)
            if result.log is not None:
                shorten(result.log)

    def _run_in(self, place: Path, result: Result, report: Callable[[], None]) -> None:
        rows, temporary = place / "rows", place / "temporary"
        temporary.mkdir()
        result.log = place / "log"
        module = f"{result.part.package}.{result.part.name}"
        command = [sys.executable, "-m", "on_gpu.part", module, str(rows)]
        command += [str(self._bundle), str(result.limit)]
        started = time.monotonic()
        with result.log.open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self._environment, "TMPDIR": str(temporary)},
                start_new_session=True,  # a process group of its own, which is killed as a whole
            )
            killed = self._watch(process, started, result, report, rows)
        result.seconds = time.monotonic() - started
        result.rows = read_rows(rows)
        _judge(result, process.returncode, killed)

    def _watch(
        self,
        process: subprocess.Popen[bytes],
        started: float,
        result: Result,
        report: Callable[[], None],
        rows: Path,
    ) -> str:
        """Wait for a part, and kill it if it takes too much; return what it took, or an empty text."""
        reported = started
        while process.poll() is None:
            now = time.monotonic()
            result.seconds = now - started
            why = self._excess(now - started, result.limit)
            if why:
                kill_group(process)
                return why
            if now - reported >= REPORT_EVERY:
                reported = now
                result.rows = read_rows(rows)
                report()
            time.sleep(POLL)
        # On a full disk a part often ends by itself, before it can print why.
        return FILLED_DISK if process.returncode and self._disk_is_full() else ""

    def _excess(self, seconds: float, limit: float) -> str:
        if seconds > limit:
            return OUT_OF_TIME
        return FILLED_DISK if self._disk_is_full() else ""

    def _disk_is_full(self) -> bool:
        return shutil.disk_usage(self._folder).free < self._limits.reserve


def _judge(result: Result, code: int, killed: str) -> None:
    """Set the outcome of a part that has ended."""
    if killed:
        result.outcome = OUT_OF_TIME if killed == OUT_OF_TIME else FAILED
        result.reason = "" if killed == OUT_OF_TIME else killed
        return
    failures = result.count(FAILED)
    if code:
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
        result.outcome, result.reason = FAILED, f"ended with {ended}: {_last_line(result.log)}"
    elif failures:
        result.outcome, result.reason = FAILED, f"{failures} of {len(result.rows)} rows failed"
    elif not result.rows:
        result.outcome, result.reason = FAILED, "reported nothing"
    elif result.count(NO_DEVICE) == len(result.rows):
        result.outcome = NO_DEVICE
    elif result.count(PASSED):
        result.outcome = PASSED
    else:
        result.outcome = MEASURED if result.count(MEASURED) else PASSED


def _last_line(log: Path | None) -> str:
    """Return the last line of what a part printed, which names the exception as a rule."""
    if log is None:
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4000))
        lines = file.read().decode(errors="replace").split("\n")
    printed = [line.strip() for line in lines if line.strip()]
    return printed[-1][:300] if printed else "it printed nothing"


def shorten(log: Path, kept: int = 512 * 1024) -> None:
    """Cut a long log down to its beginning and its end, of so many bytes each."""
    if not log.is_file() or log.stat().st_size <= 2 * kept:
        return
    with log.open("rb") as file:
        head = file.read(kept)
        file.seek(-kept, os.SEEK_END)
        tail = file.read()
    with log.open("wb") as file:  # which frees the space first
        file.write(head + b"\n[... the middle was left out ...]\n" + tail)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process with its group, and wait for it, but not for ever: a driver may hold on to it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(timeout=TO_KILL)
    except subprocess.TimeoutExpired:
        print(f"process {process.pid} does not end, as the driver holds it", file=sys.stderr)


def kill_children(seconds: float = 1.0) -> None:
    """Kill the children that are left: what a part has started in sessions of their own, which this process adopts."""
    end = time.monotonic() + seconds
    while (left := list(_children())) and time.monotonic() < end:
        for child in left:
            try:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, os.WNOHANG)
            except (ProcessLookupError, ChildProcessError):
                continue
        time.sleep(0.02)


def _children() -> Iterator[int]:
    """Yield the children of this process, by the line that the kernel has for each process."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # The name of the program stands in parentheses, and may hold anything.
            _, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):  # a process that has ended
            continue
        if int(parent) == os.getpid():
            yield int(folder.name)


def _adopt_orphans() -> None:
    """Become the parent of processes below this one whose parents end, so that they can be found and killed."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
