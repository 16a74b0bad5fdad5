"""``opgraft ops list``: every op and variant with its kernel on this machine."""

from __future__ import annotations

import click
from opgraft.cli.output import SettingsCommand, json_option, with_settings


@click.command("list", cls=SettingsCommand)
@click.option(
    "--details", is_flag=True, help="Add the kernels per platform, and what was proved of each op."
)
@json_option
@with_settings
def command(details: bool, as_json: bool) -> None:
    """List every registered op with the kernel that it gets here.

    Derived classes with the name of an op stand below the op. Exit code 1: an op has a conflict.
    """
    # Imports torch, which --help does without.
    from opgraft.cli.op_table import print_ops

    print_ops(details=details, as_json=as_json)
