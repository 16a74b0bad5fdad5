"""The option ``--shapes``: replay the calls of real models."""

from __future__ import annotations

import click
from opgraft.cli.completion import shape_names
from opgraft.testing.shapes import ShapeRecord, find_record

shapes_option = click.option(
    "--shapes",
    metavar="RECORD",
    shell_complete=shape_names,
    help="Replay the calls of real models: a file of 'opgraft trace-shapes', or a shipped record "
    "by its name, such as llama or all.",
)


def recorded(shapes: str | None) -> ShapeRecord | None:
    """Return the record of the option, or ``None`` without the option.

    Raises:
        InputError: there is no such record, or the file holds something else.
    """
    return None if shapes is None else find_record(shapes)
