"""``opgraft ops``: the catalogue, and which kernel an op gets here and why."""

from __future__ import annotations

import click
from opgraft.cli.group import LazyGroup

_COMMANDS = {
    "list": ("opgraft.cli.ops_list", "List every registered op with the kernel that it gets here."),
    "explain": ("opgraft.cli.ops_explain", "Explain which kernel an op gets here, and why."),
}


@click.group("ops", cls=LazyGroup, table=_COMMANDS)
def command() -> None:
    """Show the op catalogue, and which kernel an op gets."""
