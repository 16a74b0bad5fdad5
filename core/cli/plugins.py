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
        "Show a plugin or a platform, with --load also the outcome of loading.",
    ),
    "lock": (
        "opgraft.cli.plugins_lock",
        "Write down what is installed, so that nothing else is imported.",
    ),
    "diff": ("opgraft.cli.plugins_diff", "Show what has changed since a lockfile was written."),
    "check": (
        "opgraft.cli.plugins_check",
        "Run the most telling checks on a plugin, in less than a minute.",
    ),
    "trial": (
        "opgraft.cli.plugins_trial",
        "Run one model with and without a plugin, and say what got worse.",
    ),
    "doctor": ("opgraft.cli.plugins_doctor", "Load everything and report what is wrong."),
}


@click.group("plugins", cls=LazyGroup, table=_COMMANDS)
def command() -> None:
    """Show installed plugins, and check that they work."""
