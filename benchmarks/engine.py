"""opgraft's engine against those that people use on the same machine, with the same weights and the same prompts.

Each engine is a process in an environment of its own, which loads SmolLM2 once and then answers tasks; the engines take
turns, so that all meet the same clock speed and the same neighbours. Both seconds on the clock and seconds of CPU time
are taken; ratios are of the one that ``--cpu-time`` says, on a machine with other work of CPU time. An engine whose
environment cannot be built is named and left out. A row says its target, and where a target is missed that the
machine does not allow, the bound: from the speeds of reading memory and of products, measured in the same rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from engine_rows import Finding, Findings, Shape, print_findings
from engine_sides import Bench, Key, Record, Rounds, checkpoint_of, pythons
from engine_tasks import ENGINES, LIMITS, PARTS, SUBJECT, TASKS
from scheduler import step_rows
from timing import machine

STEP = "step"
"""The part that needs no other process: a step without its model."""


def shape_of(dtype: str, folder: Path) -> Shape:
    """Read the work per token from the checkpoint of a dtype."""
    checkpoint = checkpoint_of(ENGINES[SUBJECT], dtype, folder)
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    weights = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    return Shape.of(config, weights, getattr(torch, dtype).itemsize)


def runs(records: Mapping[Key, Record]) -> list[dict[str, Any]]:
    """Return every round of every engine and task."""
    return [
        {
            "engine": name,
            "dtype": dtype,
            "task": task,
            "tokens": TASKS[task].tokens,
            "seconds": [round(value, 4) for value in record.seconds(task, "seconds")],
            "cpu_seconds": [round(value, 4) for value in record.seconds(task, "cpu_seconds")],
            "peak_bytes": answers[-1]["peak_bytes"],
        }
        for (name, dtype), record in records.items()
        for task, answers in record.answers.items()
    ]


def described_machine(records: Mapping[Key, Record]) -> dict[str, str]:
    """Describe the machine and the versions of the engines that ran."""
    versions = {
        name: record.version
        for (name, _), record in records.items()
        if "," not in name and name != LIMITS
    }
    return {
        **machine(),
        "threads": os.environ.get("OMP_NUM_THREADS", str(os.cpu_count())),
        **versions,
    }


def write_json(file: Path, found: Findings, rows: Sequence[Finding], left_out: list[str]) -> None:
    """Write what was measured, when and where."""
    data = {
        "schema": 2,
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "machine": described_machine(found.records),
        "clock": found.clock,
        "left_out": left_out,
        "rows": [
            {**asdict(row), "measured": round(row.measured, 4), "verdict": row.verdict}
            for row in rows
        ],
        "speeds": list(found.speeds()),
        "starts": [
            {
                "engine": name,
                "dtype": dtype,
                **{clock: round(value, 3) for clock, value in start.items()},
            }
            for (name, dtype), record in found.records.items()
            for start in record.starts
        ],
        "runs": runs(found.records),
    }
    file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="opgraft's engine against others, on SmolLM2.")
    parser.add_argument("--json", type=Path, help="a file for the figures of every round")
    parser.add_argument("--quick", action="store_true", help="2 rounds, and 1 of many requests")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="compare CPU time, where other work runs beside this",
    )
    parser.add_argument(
        "--engines", nargs="*", choices=ENGINES, default=list(ENGINES), help="these only"
    )
    parser.add_argument(
        "--rows", nargs="*", choices=[*PARTS, STEP], default=[*PARTS, STEP], help="these parts only"
    )
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"], help="these only")
    parser.add_argument(
        "--checkpoints", type=Path, help="a folder where converted checkpoints are kept"
    )
    return parser.parse_args()


def measured(arguments: argparse.Namespace, folder: Path, left_out: list[str]) -> Findings:
    """Run the parts that are asked for, save the step without its model; what is cut short leaves JSON of its parts."""
    parts = [name for name in PARTS if name in arguments.rows]
    wanted = {engine for name in parts for engine in PARTS[name].engines} & set(arguments.engines)
    engines = [name for name in ENGINES if name in wanted]
    rounds = Rounds(2, 1) if arguments.quick else Rounds()
    bench = Bench(pythons(left_out, engines), folder, engines, rounds)
    shapes: dict[str, Shape] = {}
    found = Findings(bench.records, shapes, "cpu_seconds" if arguments.cpu_time else "seconds")
    for dtype in arguments.dtypes if parts else ():
        shapes[dtype] = shape_of(dtype, folder)
        for name in bench.measure(dtype, parts):
            print(f"measured: {name}, {dtype}", file=sys.stderr)
            if arguments.json:
                write_json(arguments.json, found, list(found.rows()), left_out)
    return found


def main() -> None:
    arguments, left_out = parsed(), list[str]()
    with tempfile.TemporaryDirectory() as temporary:
        found = measured(arguments, arguments.checkpoints or Path(temporary), left_out)
    rows = list(found.rows())
    if STEP in arguments.rows:
        rows += [Finding(row.name, row.measured, row.detail, most=row.limit) for row in step_rows()]
    if arguments.json:
        write_json(arguments.json, found, rows, left_out)
    print(", ".join(f"{name} {value}" for name, value in described_machine(found.records).items()))
    print_findings(rows)
    for missing in left_out:
        print(f"left out: {missing}")
    raise SystemExit(1 if any(row.verdict == "missed" for row in rows) else 0)


if __name__ == "__main__":
    main()
