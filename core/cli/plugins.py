"""``opgraft plugins``: what is installed, how far each plugin came, and what is wrong."""

from __future__ import annotations

import click
from opgraft.cli.group import LazyGroup

_COMMANDS = {
    "list": (
        "opgraft.cli.plugins_list",
        "List installed platforms and plugins, and whether the settings admit them.",
    ),
    "show": (
        "opgraft.cli.plugins_show",
        "Show a plugin or a platform, by --load what becomes of it too.",
    ),
    "lock": (
        "opgraft.cli.plugins_lock",
        "Write down what is installed, so that nothing else is imported.",
    ),
    "check": (
        "opgraft.cli.plugins_check",
        "Put a plugin before the checks that tell most, in less than a minute.",
    ),
    "doctor": ("opgraft.cli.plugins_doctor", "Load everything and report what is wrong."),
}


@click.group("plugins", cls=LazyGroup, table=_COMMANDS)
def command() -> None:
    """Show installed plugins, and check that they work."""
