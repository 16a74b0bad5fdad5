"""Modules in the way of an import, beside the RECORD of the distribution."""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import importlib_metadata
from opgraft.plugins.discovery import discover
from opgraft.plugins.metadata import Problem, distributions, is_namespace, specs_of, text_of
from opgraft.plugins.records import IMPORTABLE, among_modules, difference, is_code, rows_of
from opgraft.registry.decision import Provider

_OF_NOBODY = frozenset({"docs", "examples", "test", "tests"})
"""Packages that many distributions install by mistake, and no distribution imports."""

_NAMESPACE = (b"extend_path", b"declare_namespace")
"""Functions in the ``__init__`` of a package that distributions share."""

_UNLISTED = "which its RECORD does not list"


def stray_code(
    provider: Provider, distribution: importlib_metadata.Distribution, places: Mapping[str, str]
) -> str | None:
    """Return a sentence about an unlisted module in the way of an import, or ``None``.

    The module lies earlier on the path, or in a package of the distribution.

    Args:
        provider: the name and version of the distribution.
        distribution: the installed distribution.
        places: the place of each file by the path in RECORD.
    """
    # RECORD has paths relative to this folder.
    root = os.path.abspath(str(distribution.locate_file("")))
    # Files of data may lie among the modules or outside.
    paths = {*places, *filter(None, map(among_modules, places))}
    files = {os.path.normpath(os.path.join(root, path)) for path in paths}
    modules = [each.module for each in discover().offers if each.provider == provider]
    for module in modules:
        # An import hook may find a module without a file.
        for file in [*_files_of(module)] or ["elsewhere"]:
            if file not in files:
                return _imported_from(module, file, root)
    # Modules of entry points come first, as they name what would be imported.
    for module in sorted(set(_outermost(places.values()))):
        # A back-port is imported by other versions of Python only.
        if module.partition(".")[0] in _OF_NOBODY | sys.stdlib_module_names:
            continue
        for file in _files_of(module):
            if file not in files:
                return _imported_from(module, file, root)
    tops = {module.partition(".")[0] for module in modules}
    names = {_imported_as(file) for file in files if file.endswith(IMPORTABLE)}
    for file in _added(root, files):
        # Of two modules with one name, one hides the other.
        hides = file.endswith(IMPORTABLE) and _imported_as(file) in names
        if hides or not _is_of_another(file, root, files, tops):
            way_out = _way_out(file, root)
            return (
                f"{file} lies in a package of its own, and its RECORD does not list it: {way_out}"
            )
    return None


def _imported_from(module: str, file: str, root: str) -> str:
    way_out = _way_out(file, root)
    return f"its module {module} would be imported from {file}, {_UNLISTED}: {way_out}"


def _way_out(file: str, root: str) -> str:
    """Return the next step about a module in the way.

    Args:
        file: of the module, or words for an import without a file.
        root: the folder of modules.
    """
    for found in distributions():
        if not isinstance(found, Problem):
            path = os.path.relpath(file, str(found.locate_file("")))
            # The problem of another distribution is told elsewhere.
            with suppress(ValueError, OSError, csv.Error):
                if _lists_as_it_is(found, path, file):
                    return f"{found.name} has brought it: uninstall one of the two"
    if file.startswith(f"{root}{os.sep}"):
        return "remove it"
    try:
        here = os.getcwd()
    except FileNotFoundError:  # somebody has removed the folder
        here = ""
    entries = [entry for entry in sys.path if isinstance(entry, str)]
    folders = [os.path.normpath(os.path.join(here, entry)) for entry in entries]
    around = [folder for folder in folders if file.startswith(f"{folder}{os.sep}")]
    if not around:
        return "remove the finder on sys.meta_path, or the imported module, that leads there"
    folder = max(around, key=len)
    if folder == here:
        return f"start in another folder than {folder}, or remove the file"
    return f"take {folder} off sys.path (see PYTHONPATH), or remove the file"


def _packages(files: Iterable[str]) -> set[str]:
    """Return the folders with a module ``__init__``."""
    own = set()
    for file in files:
        folder, name = os.path.split(file)
        if name.startswith("__init__."):
            own.add(folder)
    return own


def _outermost(listed: Iterable[str]) -> Iterator[str]:
    """Yield the modules and packages outside of packages of the distribution.

    Another distribution may bring the same name.
    """
    modules = [path for path in listed if path.endswith(IMPORTABLE) and path[:2] != ".."]
    packages = set()
    for path in modules:
        folder, _, name = path.rpartition("/")
        if _stem(name) == "__init__":
            packages.add(folder)
    for path in modules:
        outermost = _first_package(path, packages) or path.rpartition(".")[0]
        parts = [_stem(part) for part in outermost.split("/")]
        if all(map(str.isidentifier, parts)):
            yield ".".join(parts)


def _first_package(path: str, packages: Collection[str]) -> str | None:
    """Return the outermost package above a module."""
    parts = path.split("/")
    for depth in range(1, len(parts)):
        folder = "/".join(parts[:depth])
        if folder in packages:
            return folder
    return None


def _stem(name: str) -> str:
    """Return the name of a file without any suffix, as in an import."""
    return name.partition(".")[0]


def _imported_as(file: str) -> str:
    """Return the path of a module without suffixes, for a package the path of the folder."""
    folder, name = os.path.split(file)
    return folder if _stem(name) == "__init__" else os.path.join(folder, _stem(name))


def _is_of_another(file: str, root: str, own: Collection[str], tops: Collection[str]) -> bool:
    """Return True if another distribution lists the module in RECORD.

    Two distributions may have a folder in common: a namespace, as vendors divide among
    distributions, or a folder without a plugin, such as the ``tests`` that many install by mistake.

    Args:
        file: unlisted code.
        root: the folder of modules.
        own: the files of the distribution.
        tops: the outermost packages of plugins in the distribution.
    """
    path = os.path.relpath(file, root)
    top = path.partition(os.sep)[0]
    above = [folder for folder in _packages(own) if file.startswith(f"{folder}{os.sep}")]
    if above and top in tops:
        return False
    if top not in _OF_NOBODY and not all(_is_shared(folder, own) for folder in above):
        return False
    for found in distributions():
        # The problem of another distribution is told elsewhere.
        with suppress(ValueError, OSError, csv.Error):
            if not isinstance(found, Problem) and _lists_as_it_is(found, path, file):
                return True
    return False


def _is_shared(package: str, own: Collection[str]) -> bool:
    """Return True for a package that serves as a namespace of several distributions."""
    modules = [file for file in own if os.path.dirname(file) == package and is_code(file)]
    initial = [file for file in modules if os.path.basename(file).startswith("__init__.")]
    try:
        # The files were compared with their hashes.
        content = b"\n".join(Path(file).read_bytes() for file in initial)
    except OSError:
        return False
    if any(name in content for name in _NAMESPACE):
        return True
    lines = content.splitlines()
    is_empty = all(line.startswith(b"#") or not line.strip() for line in lines)
    return is_empty and modules == initial


def _lists_as_it_is(found: importlib_metadata.Distribution, path: str, file: str) -> bool:
    """Return True if the RECORD of a distribution lists a file with its hash.

    Raises:
        csv.Error, ValueError, OSError: the RECORD cannot be read, or is malformed.
    """
    text = text_of(found, "RECORD") or ""
    if path not in text:
        return False
    rows = [row for row in rows_of(text) if row[0] == path and row[1]]
    return any(difference(file, *row) is None for row in rows)


def _added(root: str, listed: set[str]) -> Iterator[str]:
    """Yield unlisted code below the packages of a distribution. An import may prefer such code."""
    packages = set()
    for file in listed:
        if is_code(file) and file.startswith(root + os.sep):
            packages.add(os.path.dirname(file))
    # Top-level modules lie beside those of everybody.
    packages.discard(root)  # where other distributions lie too
    for package in sorted(packages):
        for folder, folders, names in os.walk(package):
            below = {name: os.path.join(folder, name) for name in folders}
            # An import follows a link to a folder, and os.walk does not. No wheel has such a link.
            yield from (path for path in below.values() if os.path.islink(path))
            folders[:] = [name for name, path in below.items() if path not in packages]
            if os.path.basename(folder) == "__pycache__":
                continue
            for name in filter(is_code, names):
                file = os.path.join(folder, name)
                if file not in listed:
                    yield file


def _files_of(module: str) -> Iterator[str]:
    """Yield the files of an import, first those of the packages above."""
    for spec in specs_of(module):
        if spec.has_location and spec.origin is not None:
            yield os.path.abspath(spec.origin)
        elif not is_namespace(spec):
            yield f"{spec.origin or type(spec.loader).__qualname__}, which is no file"
