"""The work of ``opgraft tune``, in a module that imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from opgraft.base.progress import progress_bar
from opgraft.base.text import printable
from opgraft.binding.measurements import OpMeasurement, ProfileFile, profile_path
from opgraft.cli.output import echo, print_json, print_table, print_wrapped
from opgraft.plugins.host import load_plugins
from opgraft.plugins.selection import current_platform
from opgraft.registry.state import host_state
from opgraft.testing import tuning
from opgraft.testing.shapes import ShapeRecord
from opgraft.testing.subjects import claimed_dtypes


def time_ops(
    ops: Sequence[str],
    dtypes: Sequence[str],
    seconds: float,
    record: ShapeRecord | None = None,
    *,
    as_json: bool,
) -> int:
    """Time the kernels of ops, print the results, and return the exit code.

    Args:
        ops: names; without names, every op with more than one kernel.
        dtypes: the names of dtypes; without names, those of the device.
        seconds: for a kernel at a shape.
        record: calls of real models to time, in place of the usual shapes.
        as_json: print JSON.
    """
    load_plugins()
    races, left_out = tuning.races(ops)
    file = ProfileFile(profile_path(host_state().settings()))
    wanted = [getattr(torch, name) for name in dtypes] or _claimed()
    measured, failed = _run_races(races, wanted, seconds, file, record)
    for race in races:
        if record is not None and race.name not in {*measured, *failed}:
            left_out[race.name] = f"no call of it in {record.name} can be replayed"
    if as_json:
        data: dict[str, Any] = {
            "file": str(file.path),
            "setup": asdict(file.setup),
            "ops": {op: row.to_dict() for op, row in measured.items()},
            "failed": failed,
            "left_out": left_out,
        }
        print_json("opgraft.tune/1", data)
    else:
        _show(measured, failed, left_out, file)
    return int(bool(failed))


def _run_races(
    races: Sequence[tuning.Race],
    wanted: Sequence[torch.dtype],
    seconds: float,
    file: ProfileFile,
    record: ShapeRecord | None,
) -> tuple[dict[str, OpMeasurement], dict[str, Mapping[str, str]]]:
    """Time the kernels of ops, and write each result to the file.

    Returns:
        Op → result, and op → reason by kernel that failed.
    """
    measured: dict[str, OpMeasurement] = {}
    failed: dict[str, Mapping[str, str]] = {}
    with progress_bar("ops measured", len(races)) as done:
        for race in races:
            outcome = tuning.run(race, wanted, seconds, record)
            if outcome.left_out:
                failed[race.name] = outcome.left_out
            # Written at once, so that an interrupted run keeps finished ops.
            if outcome.measured:
                measured[race.name] = outcome.measured
                file.add({race.name: outcome.measured})
            done(1)
    return measured, failed


def _claimed() -> list[torch.dtype]:
    """Return the device's dtypes for models. float16 replaces a missing bfloat16."""
    claimed = claimed_dtypes(current_platform())
    half = torch.bfloat16 if torch.bfloat16 in claimed else torch.float16
    return [dtype for dtype in (torch.float32, half) if dtype in claimed]


def _show(
    measured: Mapping[str, OpMeasurement],
    failed: Mapping[str, Mapping[str, str]],
    left_out: Mapping[str, str],
    file: ProfileFile,
) -> None:
    if measured:
        rows = [(op, row.chosen, row.verdict) for op, row in measured.items()]
        print_table(("op", "best", "why"), rows)
    for op, reasons in failed.items():
        print_wrapped(f"{op}: {choice} was left out: {why}" for choice, why in reasons.items())
    print_wrapped(f"{op} was not measured: {why}" for op, why in left_out.items())
    if not measured:
        echo(
            "nothing was measured: no op that was asked for has two kernels here of which one "
            "runs; 'opgraft ops list' shows the kernels, and a plugin brings more"
        )
        return
    path = printable(str(file.path))
    print_wrapped(f"{len(measured)} ops measured on {file.setup.device}, written to {path}")
    echo("OPGRAFT_CUSTOM_OPS=auto follows it")
