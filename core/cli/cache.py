"""``opgraft cache``: the cache of compiled code."""

from __future__ import annotations

import click
from opgraft.cli.group import LazyGroup

_COMMANDS = {
    "info": ("opgraft.cli.cache_info", "Show where the cache is, and what it holds."),
    "export": (
        "opgraft.cli.cache_export",
        "Write all entries to a file, for machines of the same kind.",
    ),
    "import": ("opgraft.cli.cache_import", "Take the entries of such a file."),
    "clear": ("opgraft.cli.cache_clear", "Remove all entries of the cache."),
}


@click.group("cache", cls=LazyGroup, table=_COMMANDS)
def command() -> None:
    """Look at the cache of compiled code, carry it to other machines, or empty it."""
