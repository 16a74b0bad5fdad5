"""Comparison of files with RECORD, the list by the installer."""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import re
import stat
from collections.abc import Container, Iterable, Sequence
from importlib.machinery import all_suffixes
from itertools import dropwhile
from typing import BinaryIO

from opgraft.base.files import without_waiting
from opgraft.base.text import described

_PIECE = 1 << 20  # bytes of a file that are hashed at a time
_HASHES = ("sha256", "sha384", "sha512")

_OF_INSTALLERS = re.compile(r"[^/]+\.dist-info/(INSTALLER|REQUESTED|RECORD[^/]*|[^/]+\.json)")
"""Metadata that installers write or leave out, such as ``direct_url.json``."""

_SCHEME = re.compile(r"[^/]+\.data/(purelib|platlib|scripts|headers|data)/(.+)")
"""A path in a wheel that installers lead to a folder of their choice."""

_LEADS = {
    "purelib": "",
    "platlib": "",
    "scripts": "../bin/",
    "headers": "../include/",
    "data": "../",
}
"""The beginnings of such paths in the RECORD of an installation."""

_PROGRAMS = ("bin", "Scripts")
"""Folders of programs. Installers make some of them, and change the first line of others."""

_BESIDE = ("etc", "include", "man", "opt", "share", "var")
"""First folders of data, beside ``lib``. Some installers put these among the modules."""

_LIB = "lib/"
"""The folder of libraries. Environments have their modules below, so RECORD omits the name."""

IMPORTABLE = tuple(all_suffixes())
"""The ends of the names of files that can be imported."""

_LIBRARY = re.compile(r"\.(so(\.\d+)*|dylib|dll)$")
"""The end of the name of a library, which the system's loader may find beside another one."""


def is_code(name: str) -> bool:
    """Return True for the name of a module or library."""
    return name.endswith(IMPORTABLE) or _LIBRARY.search(name) is not None


def rows_of(record: str) -> Sequence[tuple[str, str, str]]:
    """Return path, hash and size of each file; hash and size may be empty.

    Raises:
        csv.Error, ValueError: the text is no such list.
    """
    return [(path, digest, size) for path, digest, size in csv.reader(record.splitlines())]


def as_if_installed(rows: Iterable[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Return the rows of the RECORD in a wheel as an installer leads them."""
    unpacked = []
    for path, digest, size in rows:
        scheme = _SCHEME.fullmatch(path)
        place = f"{_LEADS[scheme[1]]}{scheme[2]}" if scheme else path
        unpacked.append((place, digest, size))
    return unpacked


def digest_of_wheel(rows: Iterable[tuple[str, str, str]]) -> str:
    """Return the SHA-256 of the names and hashes of files in RECORD that came from the wheel.

    The SHA-256 is equal for environments, prefixes and folders of pip and uv. An exception are data
    in a folder with a name of its own, and programs whose names end like those of modules, as
    'uv pip install --target' puts both among the modules.
    """
    hashed = [(path, digest) for path, digest, _ in rows if digest]
    places = places_of(path for path, _ in hashed)
    lines = set()
    for path, digest in hashed:
        if path in places:
            # Some tools write the padding of base64.
            lines.add(f"{places[path]},{digest.rstrip('=')}")
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def is_misplaced(path: str, root: str) -> bool:
    """Return True if a path in RECORD is spelled as no installer spells it.

    Args:
        path: relative to the folder of modules, or absolute.
        root: the folder of modules, absolute.
    """
    below = _below(path)
    if any(part in ("", ".", "..") for part in below.split("/")):
        return True
    if below == path:
        return False
    return os.path.normpath(os.path.join(root, path)).startswith(f"{root}{os.sep}")


def places_of(paths: Iterable[str]) -> dict[str, str]:
    """Return the places of files of a wheel by their paths in RECORD.

    Files that installers make or change have no place. A place outside of the folder of modules
    begins with ``../``.
    """
    listed = set(paths)
    places = {path: _place_in_wheel(path, listed) for path in listed}
    return {path: place for path, place in places.items() if place is not None}


def among_modules(path: str) -> str | None:
    """Return the place that a file outside may have among the modules; ``None`` for a file there.

    pip with ``--target`` moves ``../../share/acme.txt`` to ``share/acme.txt``.
    """
    below = _below(path)
    if below == path:
        return None
    is_named = below.partition("/")[0] in _BESIDE or below.startswith(_LIB)
    return below if is_named else f"{_LIB}{below}"


def files_to_compare(path: str, root: str) -> list[str]:
    """Return the files that must be as a row in RECORD says.

    A file outside of the folder of modules may be missing. People and installers change data there.
    """
    place = os.path.join(root, path)
    among = among_modules(path)
    if among is None:
        return [place]
    outside = [place] if is_code(path) else []
    return [file for file in [*outside, os.path.join(root, among)] if os.path.lexists(file)]


def _below(path: str) -> str:
    """Return a path without the parts that lead out of the folder of modules."""
    parts = path.split("/")
    return "/".join(dropwhile(lambda part: part in ("..", ""), parts))


def _place_in_wheel(path: str, listed: Container[str]) -> str | None:
    """Return the path of a file of a wheel, ``None`` for files that installers make or change."""
    if _OF_INSTALLERS.fullmatch(path):
        return None
    below = _below(path)
    is_outside = below != path
    top, _, rest = below.partition("/")
    is_package = f"{top}/__init__.py" in listed
    if top in _PROGRAMS and rest and "/" not in rest and not is_package:
        # Scripts may have the names of modules. Among modules, such a file could be imported.
        is_program = _LIBRARY.search(rest) is None if is_outside else not is_code(rest)
        if is_program:
            return None
    if top == "include" and rest and not is_package and not is_code(rest):
        # Environments have a folder for the version of Python, and one for the distribution.
        return f"include/{rest.rpartition('/')[2]}"
    if top == "lib" and (is_outside or not (is_package or _is_module(rest))):
        return f"../{rest}"
    return f"../{below}" if is_outside and top not in _BESIDE else below


def _is_module(path: str) -> bool:
    is_library = path.rpartition("/")[2].startswith("lib") and path.endswith(".so")
    return path.endswith(IMPORTABLE) and not is_library


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
            found = digest_of(file, kind)
    except FileNotFoundError:
        return f"{path}, which RECORD lists, is missing"
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
