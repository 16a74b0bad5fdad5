"""Files of API keys."""

from __future__ import annotations

from pathlib import Path

from opgraft.base.text import described
from opgraft.errors import ConfigError


def read_keys(path: str | Path, setting: str) -> list[str]:
    """Return the keys of a file, one on each line; empty lines and those that begin with ``#`` are none.

    Args:
        path: of the file.
        setting: what it was given by, which errors name.

    Raises:
        ConfigError: it cannot be read, has no key, or one with blanks.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting}, {path}, cannot be read: {described(error)}") from error
    keys = {number: line.strip() for number, line in enumerate(lines, 1)}
    keys = {number: key for number, key in keys.items() if key and not key.startswith("#")}
    for number, key in keys.items():
        if len(key.split()) > 1:
            raise ConfigError(
                f"{setting}, {path}, has blanks in line {number}: a line has one key and nothing else"
            )
    if not keys:
        raise ConfigError(
            f"{setting}, {path}, has no key: put one on each line, or leave the setting out"
        )
    return list(keys.values())
