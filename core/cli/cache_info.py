"""``opgraft cache info``: where the cache of compiled code is, and what it holds."""

from __future__ import annotations

import click
from opgraft.cli.output import SettingsCommand, json_option, print_json, print_wrapped, with_settings
from opgraft.compilation.cache import CompilationCache
from opgraft.state import host_state


@click.command("info", cls=SettingsCommand)
@json_option
@with_settings
def command(as_json: bool) -> None:
    """Show where the cache of compiled code is, and what it holds."""
    figures = CompilationCache.of(host_state().settings().config.compilation_config, make=False).figures()
    if as_json:
        print_json("opgraft.cache.info/1", figures.to_dict())
    else:
        print_wrapped(f"{figures.folder}: {figures.entries} entries, {figures.nbytes:,} of {figures.limit:,} bytes")
