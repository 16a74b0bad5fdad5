"""The local cache of models from the Hugging Face Hub, as its own tools write it. Nothing is downloaded."""

from __future__ import annotations

import re
from pathlib import Path

from opgraft.config.environment import hub_cache

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LONGEST = 200  # characters of a name; the Hub gives each part 96
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAIN = "main"


def is_hub_name(name: str) -> bool:
    """Return True for a name such as ``org/name``, which may stand for a model of the Hub."""
    return len(name) <= _LONGEST and _NAME.fullmatch(name) is not None


def cached_snapshot(name: str) -> Path | None:
    """Return the folder of a model in the cache, or ``None`` if there is none.

    The commit is that of the branch ``main`` when it was downloaded. If only another revision was downloaded, the
    folder is that of the revision.
    """
    folder = hub_cache() / f"models--{name.replace('/', '--')}"
    snapshots = folder / "snapshots"
    try:
        commit = (folder / "refs" / _MAIN).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        commit = ""
    if _COMMIT.fullmatch(commit) and (snapshots / commit).is_dir():
        return snapshots / commit
    found = [path for path in snapshots.glob("*") if path.is_dir()]
    return found[0] if len(found) == 1 else None
