"""The installed files of a plugin, for the question whether it is safe. Nothing is imported."""

from __future__ import annotations

import os
import re
from typing import Any

from importlib_metadata import Distribution
from opgraft.base.elf import linked_libraries
from opgraft.base.text import described
from opgraft.errors import PluginError
from opgraft.plugins.locking import damage, hashed_files
from opgraft.plugins.metadata import fields_of

_LIBRARY = re.compile(r"\.(so(\.\d+)*|dylib|dll|pyd)$")
_PUBLISHERS = ("author", "author-email", "maintainer", "maintainer-email")


def contents_of(distribution: Distribution) -> dict[str, Any]:
    """Return the facts about the files of a distribution as plain data.

    ``damage`` is a difference from RECORD, ``publisher`` is what the metadata says, and ``links``
    has the libraries that a native library needs, ``None`` if it is no ELF file.
    """
    try:
        paths = hashed_files(distribution)
        found = damage(distribution)
    except (PluginError, ValueError, OSError) as error:
        paths = []
        found = str(error)
    places = {path: str(distribution.locate_file(path)) for path in paths}
    libraries = []
    for path, place in places.items():
        if _LIBRARY.search(path):
            libraries.append({"file": path, **_links(place)})
    # A file of RECORD may be missing. The damage tells.
    present = [place for place in places.values() if os.path.exists(place)]
    return {
        "files": len(places),
        "bytes": sum(map(os.path.getsize, present)),
        "damage": found,
        "libraries": libraries,
        "publisher": _publisher(distribution),
    }


def _links(place: str) -> dict[str, Any]:
    try:
        return {"links": linked_libraries(place), "problem": None}
    except (OSError, ValueError) as error:
        return {"links": None, "problem": described(error)}


def _publisher(distribution: Distribution) -> str | None:
    try:
        fields = fields_of(distribution)
    except (ValueError, OSError):
        return None
    claimed = [value for name in _PUBLISHERS for value in fields.get(name, []) if value]
    return ", ".join(dict.fromkeys(claimed)) or None
