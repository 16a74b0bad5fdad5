"""``opgraft tune``: find the fastest kernel of each op on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import click
import torch
from opgraft.base.progress import progress_bar
from opgraft.base.text import printable
from opgraft.binding.measurements import OpMeasurement, ProfileFile, profile_path
from opgraft.cli.completion import op_names
from opgraft.cli.output import (
    SettingsCommand,
    echo,
    json_option,
    print_json,
    print_table,
    print_wrapped,
    with_settings,
)
from opgraft.plugins.host import load_plugins
from opgraft.plugins.selection import current_platform
from opgraft.registry.state import host_state
from opgraft.testing import tuning
from opgraft.testing.subjects import claimed_dtypes

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in tuning.DTYPES}


@click.command("tune", cls=SettingsCommand)
@click.argument("ops", nargs=-1, shell_complete=op_names)
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(list(_DTYPES)),
    multiple=True,
    help="Of inputs; may be repeated.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=0.02,
    show_default=True,
    help="For which a kernel is timed at a shape.",
)
@json_option
@with_settings
def command(ops: tuple[str, ...], dtypes: tuple[str, ...], seconds: float, as_json: bool) -> int:
    """Time the kernels of OPS on this machine, and record the best, for 'auto' in custom_ops.

    Without OPS, every op with more than one kernel is timed. Each result is written at once, so an
    interrupted run keeps the results so far. Exit code 1: a kernel raised an error, or computes
    other values than its op.
    """
    load_plugins()
    races, left_out = tuning.races(ops)
    file = ProfileFile(profile_path(host_state().settings()))
    wanted = [_DTYPES[name] for name in dtypes] or _claimed()
    measured, failed = _run_races(races, wanted, seconds, file)
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
) -> tuple[dict[str, OpMeasurement], dict[str, Mapping[str, str]]]:
    """Time the kernels of ops, and write each result to the file.

    Returns:
        Op → result, and op → reason by kernel that failed.
    """
    measured: dict[str, OpMeasurement] = {}
    failed: dict[str, Mapping[str, str]] = {}
    with progress_bar("ops measured", len(races)) as done:
        for race in races:
            outcome = tuning.run(race, wanted, seconds)
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
