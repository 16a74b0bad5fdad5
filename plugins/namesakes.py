"""The installed version among several in one folder, as upgrades that did not end leave them."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import importlib_metadata
from opgraft.plugins.metadata import fields_of, text_of
from opgraft.plugins.records import difference, rows_of

_MOST = 2_000  # files of a distribution that are compared
_INFO = (".dist-info", ".egg-info")
_COMPILED = (".pyc", ".pyo")


def installed_among(several: Sequence[importlib_metadata.Distribution]) -> tuple[int, str]:
    """Choose among the versions of a distribution in one folder.

    Returns:
        The place in ``several`` of the version with its files as listed in RECORD, or of the latest
        of those; and the reason.
    """
    shares = [_share_there(each) for each in several]
    best = max(shares)
    rivals = []
    for place, share in enumerate(shares):
        if share == best:
            rivals.append(place)
    chosen = max(rivals, key=lambda place: _version(several[place]))
    if len(rivals) > 1:
        return chosen, "it is the latest version"
    return chosen, _how_many(best)


def _how_many(share: float) -> str:
    """Return a sentence about the share of existing files."""
    if share == 1:
        return "its files are there as its RECORD lists them"
    percent = "less than 1 %"
    if share >= 0.01:
        percent = f"{math.floor(100 * share)} %"
    if share > 0.5:
        return f"most of its files, {percent}, are there as its RECORD lists them"
    return f"{percent} of the files in its RECORD are there; the other copies have fewer"


def _share_there(distribution: importlib_metadata.Distribution) -> float:
    """Return the share of the files in RECORD with the right content; 0 without a RECORD."""
    try:
        rows = rows_of(text_of(distribution, "RECORD") or "")
    except (ValueError, OSError, csv.Error):
        return 0.0
    compared = (row for row in rows if _is_compared(row[0]))
    files = list(islice(compared, _MOST))
    if not files:
        return 0.0
    there = sum(_is_there(distribution, *row) for row in files)
    return there / len(files)


def _is_compared(path: str) -> bool:
    """Return True for a file of the distribution, not of its metadata, scripts or a cache."""
    top = path.partition("/")[0]
    return not (top == ".." or top.endswith(_INFO) or path.endswith(_COMPILED))


def _is_there(
    distribution: importlib_metadata.Distribution, path: str, digest: str, size: str
) -> bool:
    place = Path(str(distribution.locate_file(path)))
    if not digest:
        return place.is_file()
    return difference(place, path, digest, size) is None


def _version(distribution: importlib_metadata.Distribution) -> tuple[bool, Any]:
    """Return the key for comparing versions. An unreadable version comes before the others."""
    from packaging.version import InvalidVersion, Version  # costs 20 ms, and is needed here only

    text = fields_of(distribution)["version"][0]
    try:
        return True, Version(text)
    except InvalidVersion:
        return False, text
