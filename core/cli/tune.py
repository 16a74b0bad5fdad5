"""``opgraft tune``: find the fastest kernel of each op on this machine."""

from __future__ import annotations

import click
from opgraft.cli.completion import op_names
from opgraft.cli.output import SettingsCommand, json_option, with_settings
from opgraft.cli.shapes_option import recorded, shapes_option
from opgraft.config.sections import DTYPES

_DTYPES = tuple(name for name in DTYPES if name != "auto")


@click.command("tune", cls=SettingsCommand)
@click.argument("ops", nargs=-1, shell_complete=op_names)
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(_DTYPES),
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
@shapes_option
@json_option
@with_settings
def command(
    ops: tuple[str, ...],
    dtypes: tuple[str, ...],
    seconds: float,
    shapes: str | None,
    as_json: bool,
) -> int:
    """Time the kernels of OPS on this machine, and record the best, for 'auto' in custom_ops.

    Without OPS, every op with more than one kernel is timed. Each result is written at once, so an
    interrupted run keeps the results so far. Exit code 1: a kernel raised an error, or computes
    other values than its op.
    """
    record = recorded(shapes)
    # Imports torch, which --help does without.
    from opgraft.cli.timed_ops import time_ops

    return time_ops(ops, dtypes, seconds, record, as_json=as_json)
