"""``opgraft cache info``: the place and content of the cache of compiled code."""

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
from opgraft.compilation.shared_folder import count_entries
from opgraft.errors import InputError
from opgraft.registry.state import host_state


@click.command("info", cls=SettingsCommand)
@json_option
@with_settings
def command(as_json: bool) -> None:
    """Show the cache of compiled code: its place, its content, a shared folder, and if it is on."""
    resolved = host_state().settings()
    settings = resolved.config.compilation_config
    # Not set means on.
    enabled = settings.cache is not False
    figures = CompilationCache.of(settings, make=False).figures()
    url = settings.cache_remote
    shared = None if url is None else _shared_folder_data(url)
    if as_json:
        print_json(
            "opgraft.cache.info/1", {**figures.to_dict(), "enabled": enabled, "shared": shared}
        )
        return
    print_wrapped(
        f"{figures.folder}: {figures.entries} entries, {figures.nbytes:,} of {figures.limit:,} "
        "bytes"
    )
    off = f"off: {resolved.named('compilation_config.cache')} is false"
    print_wrapped("on; compilation_config.cache=false turns it off" if enabled else off)
    if shared is not None:
        held = f"{url}: {shared['entries']} entries"
        print_wrapped(f"shared: {shared['problem'] or held}")


def _shared_folder_data(url: str) -> dict[str, str | int | None]:
    """Return the shared folder as plain data, with the problem of an unreadable one."""
    try:
        return {"folder": url, "entries": count_entries(url), "problem": None}
    except InputError as error:
        return {"folder": url, "entries": None, "problem": str(error)}
