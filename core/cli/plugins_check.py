"""``opgraft plugins check``: the short form of ``opgraft conformance``, for work on a plugin."""

from __future__ import annotations

import sys

import click
from opgraft.cli.conformance import Run, report
from opgraft.cli.evidence import ConformanceEvidence
from opgraft.cli.output import SettingsCommand, with_settings
from opgraft.cli.shapes_option import recorded, shapes_option


@click.command("check", cls=SettingsCommand)
@click.argument("name")
@shapes_option
@with_settings
def command(name: str, shapes: str | None) -> None:
    """Run the most telling checks on the plugin NAME, on small inputs, in less than a minute.

    The checks look at registration, values, drawn inputs, strides, gradients, compilation, cheats
    and the platform. Exit code 1: a check failed.
    """
    recorded(shapes)
    found = ConformanceEvidence()
    Run(name, found, None, shapes, brief=True).judge()
    report(found, None)
    sys.exit(1 if found.failed() else 0)
