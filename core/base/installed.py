"""Read the versions and origins of installed distributions, with limits against broken metadata."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import importlib_metadata
from opgraft.base.files import read_regular

LARGEST = 1 << 22
"""The largest number of bytes of a file of metadata."""

_ORIGIN = "direct_url.json"
"""The file of an installer for a distribution from a folder or URL instead of an index."""

_FILES = ("METADATA", "PKG-INFO")
_VERSION = re.compile(rb"^Version:[ \t]*(\S+)", re.M)


def version_of(name: str) -> str | None:
    """Return the version of an installed distribution, ``None`` without readable metadata."""
    found = next(iter(importlib_metadata.distributions(name=name)), None)
    if found is None:
        return None
    # importlib-metadata has no public name for this.
    place = vars(found).get("_path")
    # A distribution in an archive has no folder.
    if not isinstance(place, Path):
        return found.version
    for file in _FILES:
        # The headers end at an empty line, and the description below may say anything.
        try:
            version = _VERSION.search(read_regular(place / file, LARGEST).partition(b"\n\n")[0])
        except (OSError, ValueError):
            continue
        return version[1].decode(errors="replace") if version else None
    return None


def source_of(name: str) -> str:
    """Return the folder or URL of an installed distribution for pip; from an index, the name."""
    found = next(iter(importlib_metadata.distributions(name=name)), None)
    try:
        text = found.read_text(_ORIGIN) if found else None
        return name if text is None else _url_for_pip(json.loads(text))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        # The file is broken.
        return name


def _url_for_pip(origin: Mapping[str, Any]) -> str:
    """Return the folder or URL of an origin."""
    url = origin["url"]
    if not isinstance(url, str):
        raise TypeError(f"the URL is {url!r}")
    folder = origin.get("subdirectory")
    fragment = f"#subdirectory={quote(folder)}" if folder else ""
    commit = origin.get("vcs_info")
    if commit:
        tool, number = commit["vcs"], commit["commit_id"]
        return f"{tool}+{url}@{number}{fragment}"
    parts = urlsplit(url)
    if parts.scheme == "file" and not fragment:
        return unquote(parts.path)
    return f"{url}{fragment}"
