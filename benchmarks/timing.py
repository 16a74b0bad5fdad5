"""Common code of the benchmarks: interleaved timing, and one table of measured values against their limits."""

from __future__ import annotations

import argparse
import gc
import json
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]

NEAR = 1.25
"""Times what is possible, up to which a row counts as near it."""


@dataclass(frozen=True)
class Row:
    """One measured value.

    Attributes:
        name: what was compared with what.
        measured: a ratio, or a count.
        limit: the highest value that is fine; ``None`` where any is.
        detail: the absolute figures behind it, in words.
        possible: the least that this machine allows, where that is known.
    """

    name: str
    measured: float
    limit: float | None
    detail: str
    possible: float | None = None

    @property
    def ok(self) -> bool:
        return self.verdict in ("", "ok", "beyond")

    @property
    def verdict(self) -> str:
        """Return "ok", "over", or "beyond" for a limit that this machine does not allow; "" without a limit.

        What is far above what is possible is over, whatever the limit.
        """
        if self.limit is None:
            return ""
        if self.measured <= self.limit:
            return "ok"
        beyond = (
            self.possible is not None
            and self.limit < self.possible
            and self.measured <= NEAR * self.possible
        )
        return "beyond" if beyond else "over"


def ratio(
    name: str,
    limit: float | None,
    subject: Callable[[], object],
    baseline: Callable[[], object],
    *,
    number: int,
    rounds: int,
) -> Row:
    """Measure how long ``subject`` takes over ``baseline``: the median of the ratios of ``rounds`` rounds.

    A round times ``number`` calls of either side, one right after the other, so that both meet the same clock speed and
    the same neighbours; which goes first alternates. One round more, at the start, warms up and is not counted.
    """
    pairs = [
        _round(subject, baseline, number, swap=bool(index % 2)) for index in range(rounds + 1)
    ][1:]
    subject_time, baseline_time = (statistics.median(side) for side in zip(*pairs, strict=True))
    measured = statistics.median(ours / theirs for ours, theirs in pairs)
    detail = f"{_seconds(subject_time)} over {_seconds(baseline_time)}, {rounds} rounds of {number}"
    return Row(name, round(measured, 4), limit, detail)


def difference(
    name: str,
    limit: float | None,
    subject: Callable[[], object],
    baseline: Callable[[], object],
    *,
    number: int,
    rounds: int,
) -> Row:
    """Measure how many microseconds longer ``subject`` takes than ``baseline``: the median over rounds."""
    pairs = [
        _round(subject, baseline, number, swap=bool(index % 2)) for index in range(rounds + 1)
    ][1:]
    subject_time, baseline_time = (statistics.median(side) for side in zip(*pairs, strict=True))
    measured = statistics.median(ours - theirs for ours, theirs in pairs) * 1e6
    detail = f"{_seconds(subject_time)} over {_seconds(baseline_time)}, {rounds} rounds of {number}"
    return Row(name, round(measured, 4), limit, detail)


def _round(
    subject: Callable[[], object], baseline: Callable[[], object], number: int, *, swap: bool
) -> tuple[float, float]:
    """Measure seconds per call of either side."""
    if swap:
        theirs, ours = _seconds_per_call(baseline, number), _seconds_per_call(subject, number)
    else:
        ours, theirs = _seconds_per_call(subject, number), _seconds_per_call(baseline, number)
    return ours, theirs


def _seconds_per_call(call: Callable[[], object], number: int) -> float:
    """Run the garbage collector before, never during: otherwise one side pays for what the other left behind."""
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        for _ in range(number):
            call()
        return (time.perf_counter() - start) / number
    finally:
        gc.enable()


def _seconds(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def machine() -> dict[str, str]:
    """Describe the machine as far as a reader needs it to compare these figures with others."""
    return {"cpu": _cpu_name(), "torch": version("torch"), "python": platform.python_version()}


def this_run() -> dict[str, str]:
    """Return the command of this process, the day, and the commit of the code that runs."""
    script = Path(sys.argv[0]).resolve()
    # From the repository, as the targets of the Makefile call it.
    name = script.relative_to(REPOSITORY) if script.is_relative_to(REPOSITORY) else script.name
    return {
        "command": shlex.join([str(name), *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": _commit(),
    }


def _commit() -> str:
    """Return the commit, with a mark if files other than figures were changed since then."""
    if not (REPOSITORY / ".git").exists():
        return "unknown"
    # A run may have written figures before this one.
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs/figures")
    return _git("rev-parse", "HEAD") + (" with changes" if changed else "")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(REPOSITORY), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor() or "unknown"


def report(description: str, measure: Callable[[], Sequence[Row]]) -> None:
    """Run the main program of a benchmark: measure, print, and exit with 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    rows = measure()
    if arguments.json:
        values = [{**asdict(row), "ok": row.ok} for row in rows]
        print(json.dumps({"schema": 1, "machine": machine(), "rows": values}, indent=2))
    else:
        print_table(rows)
    sys.exit(0 if all(row.ok for row in rows) else 1)


def print_table(rows: Sequence[Row]) -> None:
    width = max(len(row.name) for row in rows)
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print(f"{'':{width}}  measured   limit  verdict  possible here")
    for row in rows:
        limit, possible = (
            "" if value is None else f"{value:.3g}" for value in (row.limit, row.possible)
        )
        print(
            f"{row.name:{width}}  {row.measured:8.4g}  {limit:>6}  {row.verdict:7}  {possible:13}  {row.detail}"
        )
