"""Versions of installed distributions, read with limits: metadata is written by everybody, and may be anything."""

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
"""Bytes of a file of metadata."""

_ORIGIN = "direct_url.json"
"""Written by an installer for what comes from a folder or a URL, and not from an index."""

_FILES = ("METADATA", "PKG-INFO")
_VERSION = re.compile(rb"^Version:[ \t]*(\S+)", re.M)


def version_of(name: str) -> str | None:
    """Return the version of an installed distribution, ``None`` of one without metadata that can be read."""
    found = next(iter(importlib_metadata.distributions(name=name)), None)
    if found is None:
        return None
    place = vars(found).get("_path")  # for which importlib-metadata has no public name
    if not isinstance(place, Path):  # in an archive
        return found.version
    for file in _FILES:
        try:
            version = _VERSION.search(read_regular(place / file, LARGEST).partition(b"\n\n")[0])
        except (OSError, ValueError):
            continue
        return version[1].decode(errors="replace") if version else None
    return None


def source_of(name: str) -> str:
    """Return the folder or URL of an installed distribution as pip takes it; of one from an index, its name."""
    found = next(iter(importlib_metadata.distributions(name=name)), None)
    try:
        text = found.read_text(_ORIGIN) if found else None
        return name if text is None else _url_for_pip(json.loads(text))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return name  # of a broken file


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
