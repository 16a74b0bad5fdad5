"""Comparison of files with RECORD, the list by the installer."""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import re
import stat
from collections.abc import Container, Iterable, Sequence
from typing import BinaryIO

from opgraft.base.files import without_waiting
from opgraft.base.text import described

_LARGEST = 1 << 24  # bytes of a file outside of the folder of the distribution
_PIECE = 1 << 20  # bytes of a file that are hashed at a time
_HASHES = ("sha256", "sha384", "sha512")

_OF_INSTALLERS = re.compile(r"[^/]+\.dist-info/(INSTALLER|REQUESTED|RECORD[^/]*|[^/]+\.json)")
"""Metadata that installers write or leave out, such as ``direct_url.json``."""

_SCHEME = re.compile(r"[^/]+\.data/(purelib|platlib|scripts|headers|data)/(.+)")
"""A path in a wheel that installers lead to a folder of their choice."""

_PROGRAMS = ("bin", "Scripts")
"""Folders of programs. Installers make some of them, and change the first line of others."""

_BESIDE = ("..", "", "share", "etc", "include")
"""First folders of paths that lead out of the folder of modules.

An empty one begins an absolute path. 'uv pip install --target' has the others among the modules.
"""


def rows_of(record: str) -> Sequence[tuple[str, str, str]]:
    """Return path, hash and size of each file; hash and size may be empty.

    Raises:
        csv.Error, ValueError: the text is no such list.
    """
    return [(path, digest, size) for path, digest, size in csv.reader(record.splitlines())]


def digest_of_wheel(rows: Iterable[tuple[str, str, str]]) -> str:
    """Return the SHA-256 of the names and hashes of files in RECORD that came from the wheel.

    The SHA-256 is equal for every installer and every place.
    """
    hashed = {path: digest for path, digest, _ in rows if digest}
    lines = set()
    for path, digest in hashed.items():
        place = _place_in_wheel(path, hashed)
        if place is not None:
            # Some tools write the padding of base64.
            lines.add(f"{place},{digest.rstrip('=')}")
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def _place_in_wheel(path: str, listed: Container[str]) -> str | None:
    """Return the path of a file of a wheel, ``None`` for files that installers make or change.

    For files outside of the folder of modules, only the last name is returned.
    """
    if _OF_INSTALLERS.fullmatch(path):
        return None
    scheme = _SCHEME.fullmatch(path)
    if scheme is not None:
        return _place_in_scheme(scheme[1], scheme[2])
    *folders, name = path.split("/")
    is_outside = bool(folders) and folders[0] in _BESIDE
    is_flat = len(folders) == 1 and f"{folders[0]}/__init__.py" not in listed
    if folders and folders[-1] in _PROGRAMS and (is_outside or is_flat):
        return None
    return name if is_outside else path


def _place_in_scheme(scheme: str, path: str) -> str | None:
    if scheme == "scripts":
        return None
    return path if scheme in ("purelib", "platlib") else path.rpartition("/")[2]


def difference(place: str | os.PathLike[str], path: str, digest: str, size: str) -> str | None:
    """Return the difference of a file from its row in RECORD, or ``None``."""
    kind, _, expected = digest.partition("=")
    if kind not in _HASHES:
        return f"the hash of {path} in its RECORD is {kind!r}, expected one of {', '.join(_HASHES)}"
    try:
        with open(place, "rb", opener=without_waiting) as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                return f"{path} is no regular file"
            # The size first: no need to read a file of another size.
            if str(state.st_size) != size:
                listed = size or "none"
                return (
                    f"{path} is not the file that RECORD lists: it has {state.st_size} bytes, "
                    f"listed are {listed}"
                )
            if path.startswith(("..", "/")) and state.st_size > _LARGEST:
                return f"{path}, which lies elsewhere, has more than {_LARGEST:,} bytes"
            found = digest_of(file, kind)
    except FileNotFoundError:
        # Scripts lie outside of the folder for imports. 'pip install --target' leaves them out.
        return None if path.startswith(("..", "/")) else f"{path}, which RECORD lists, is missing"
    except (OSError, ValueError) as error:
        return f"{path} cannot be read: {described(error)}"
    text = base64.urlsafe_b64encode(found).decode()
    if text.rstrip("=") != expected.rstrip("="):
        return f"{path} is not the file that RECORD lists: its {kind} differs"
    return None


def digest_of(file: BinaryIO, kind: str = "sha256") -> bytes:
    """Return the digest of the rest of a file."""
    found = hashlib.new(kind)
    while piece := file.read(_PIECE):
        found.update(piece)
    return found.digest()
