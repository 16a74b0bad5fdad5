"""``opgraft ops explain``: the kernel of an op on this machine, with reasons."""

from __future__ import annotations

import click
from opgraft.cli.completion import op_names
from opgraft.cli.output import SettingsCommand, json_option, with_settings


@click.command("explain", cls=SettingsCommand)
@click.argument("name", shell_complete=op_names)
@json_option
@with_settings
def command(name: str, as_json: bool) -> None:
    """Explain which kernel an op gets here, and why.

    Prints candidates, winner, reasons, file:line, and the setting that would change the choice.
    NAME is the name of an op, a class, a replacement, a kernel such as RMSNorm.forward_native, or a
    functional form.
    """
    # Imports torch, which --help does without.
    from opgraft.cli.op_explanation import print_explanation

    print_explanation(name, as_json=as_json)
