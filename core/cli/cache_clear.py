"""``opgraft cache clear``: empty the cache of compiled code."""

from __future__ import annotations

import click
from opgraft.cli.output import (
    SettingsCommand,
    json_option,
    print_json,
    print_wrapped,
    with_settings,
)
from opgraft.compilation.cache import CompilationCache
from opgraft.registry.state import host_state


@click.command("clear", cls=SettingsCommand)
@json_option
@with_settings
def command(as_json: bool) -> None:
    """Remove all entries of the cache of compiled code."""
    cache = CompilationCache.of(host_state().settings().config.compilation_config, make=False)
    removed = cache.clear()
    if as_json:
        print_json("opgraft.cache.clear/1", {"folder": str(cache.folder), "removed": removed})
    else:
        print_wrapped(f"{cache.folder}: {removed} entries removed")
