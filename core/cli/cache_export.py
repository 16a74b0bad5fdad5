"""``opgraft cache export``: write the cache of compiled code to a file."""

from __future__ import annotations

from pathlib import Path

import click
from opgraft.cli.output import (
    GivenPath,
    SettingsCommand,
    json_option,
    print_json,
    print_wrapped,
    with_settings,
)
from opgraft.compilation.bundles import export_entries, read_key
from opgraft.compilation.cache import CompilationCache
from opgraft.registry.state import host_state

key_option = click.option(
    "--key",
    metavar="FILE",
    type=GivenPath(dir_okay=False, path_type=Path),
    help="The key that signs the bundle.",
)


@click.command("export", cls=SettingsCommand)
@click.argument("file")
@key_option
@json_option
@with_settings
def command(file: str, key: Path | None, as_json: bool) -> None:
    """Write all entries of the cache of compiled code to FILE, a path or a URL.

    An example of a URL is s3://bucket/name. 'opgraft cache import' reads the bundle on machines of
    the same kind. The import needs the SHA-256 of the bundle, unless the bundle is signed.
    """
    cache = CompilationCache.of(host_state().settings().config.compilation_config, make=False)
    bundle = export_entries(cache, file, read_key(key) if key else None)
    if as_json:
        print_json("opgraft.cache.export/1", bundle.to_dict())
    else:
        print_wrapped(
            f"{file}: {bundle.entries} entries, {bundle.nbytes:,} bytes, SHA-256 {bundle.sha256}"
        )
