"""``opgraft cache import``: take compiled code from a file of another machine."""

from __future__ import annotations

from pathlib import Path

import click
from opgraft.cli.cache_export import key_option
from opgraft.cli.output import (
    SettingsCommand,
    json_option,
    print_json,
    print_wrapped,
    with_settings,
)
from opgraft.compilation.bundles import import_entries, read_key
from opgraft.compilation.cache import CompilationCache
from opgraft.registry.state import host_state


@click.command("import", cls=SettingsCommand)
@click.argument("file")
@key_option
@click.option(
    "--sha256",
    metavar="DIGEST",
    help="The digest of the bundle, from the output of 'opgraft cache export'.",
)
@json_option
@with_settings
def command(file: str, key: Path | None, sha256: str | None, as_json: bool) -> None:
    """Take the new entries of the bundle FILE, a path or a URL, into the cache of compiled code.

    The entries are code for later processes. So name the SHA-256 of the bundle by --sha256, or the
    key that has signed it by --key. A bundle of another environment is refused.
    """
    cache = CompilationCache.of(host_state().settings().config.compilation_config)
    bundle = import_entries(cache, file, key=read_key(key) if key else None, sha256=sha256)
    if as_json:
        print_json("opgraft.cache.import/1", bundle.to_dict())
    else:
        print_wrapped(f"{cache.folder}: {bundle.taken} of {bundle.entries} entries are new")
