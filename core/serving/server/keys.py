"""Files of API keys."""

from __future__ import annotations

from pathlib import Path

from opgraft.base.text import described
from opgraft.errors import ConfigError


def read_keys(path: str | Path, setting: str) -> list[str]:
    """Return the keys of a file, one on each line. Empty lines and lines with ``#`` are skipped.

    Args:
        path: of the file.
        setting: the setting with the path, for errors.

    Raises:
        ConfigError: the file cannot be read, has no key, or a key has blanks.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting}, {path}, cannot be read: {described(error)}") from error
    keys = []
    for number, line in enumerate(lines, 1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if len(key.split()) > 1:
            raise ConfigError(
                f"{setting}, {path}, has blanks in line {number}: a line has one key and nothing "
                "else"
            )
        keys.append(key)
    if not keys:
        raise ConfigError(
            f"{setting}, {path}, has no key: put one on each line, or leave the setting out"
        )
    return keys
