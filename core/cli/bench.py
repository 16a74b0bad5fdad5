"""``opgraft bench``: how fast things run."""

from __future__ import annotations

import click
from opgraft.cli.group import LazyGroup

_COMMANDS = {
    "serve": (
        "opgraft.cli.bench_serve",
        "Put load on a server with OpenAI's interface, and measure it.",
    ),
}


@click.group("bench", cls=LazyGroup, table=_COMMANDS)
def command() -> None:
    """Measure how fast things run."""
