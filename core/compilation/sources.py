"""The sources that decide on compiled code: packages and modules, each by a digest of its files."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from opgraft.base.files import read_regular, replace_file
from opgraft.compilation.python_code import code_digest, functions_of, is_covered, is_own

_SUFFIXES = (".py", ".so", ".cpp", ".h")
_SETTLED = 2_000_000_000
"""Nanoseconds since a change of a file after which another one would have another time."""

_MOST = 1 << 14
"""Packages and modules that an index remembers."""

_LARGEST = 1 << 24
"""Bytes of an index."""


Stat: TypeAlias = Callable[[], os.stat_result]


class Sources:
    """Digests of packages and modules. An index remembers them from process to process, as long as no file of one has
    another size or time.

    Args:
        index: the file of it; without one every file is read.
    """

    def __init__(self, index: Path | None = None) -> None:
        self._index = index
        self._known: dict[str, list[Any]] = {}
        self._seen: dict[str, list[Any]] = {}
        self._packages: dict[str, str] = {}
        if index is not None:
            with contextlib.suppress(OSError, ValueError, RecursionError):
                read = json.loads(read_regular(index, _LARGEST))
                self._known = read if isinstance(read, dict) else {}

    def keep(self) -> None:
        """Write the index, if it has not all that was read."""
        new = {path: found for path, found in self._seen.items() if self._known.get(path) != found}
        settled = time.time_ns() - _SETTLED
        kept = {path: found for path, found in new.items() if found[1] < settled}
        if self._index is not None and kept:
            others = self._known if len(self._known) + len(kept) < _MOST else {}
            with contextlib.suppress(OSError):  # as on a full disk, where files are read again
                replace_file(self._index, json.dumps({**others, **kept}), 0o600)

    def package(self, name: str) -> str:
        """Digest the sources of an imported package, or of a module that stands alone."""
        if name not in self._packages:
            module = sys.modules.get(name)
            file, folders = getattr(module, "__file__", None), [*getattr(module, "__path__", ())]
            files = [each for folder in folders for each in _below(folder)]
            found = (
                self._digest(os.pathsep.join(folders), files)
                if files
                else self._module(module, file)
            )
            self._packages[name] = found
        return self._packages[name]

    def modules(self, names: Iterable[str]) -> Iterator[str]:
        """Yield modules, each with the version of its package and a digest, and those that they name.

        Those that are in the key by their package are left out. Of an installed package the version stands for what
        its modules name.
        """
        pending, seen = [*names], set[str]()
        while pending:
            name = pending.pop()
            module, package = sys.modules.get(name), sys.modules.get(name.partition(".")[0])
            if name in seen or is_covered(name) or module is None:
                continue
            seen.add(name)
            file, version = getattr(module, "__file__", None), getattr(package, "__version__", "")
            yield f"{name} {version} {self._module(module, file)}"
            if is_own(name):
                pending += _names_of_modules(module)

    def _module(self, module: Any, file: str | None) -> str:
        if file:
            return self._digest(file, [(file, functools.partial(os.stat, file))])
        return _sum("".join(sorted(_sources_of_module(module))).encode())

    def _digest(self, place: str, files: Iterable[tuple[str, Stat]]) -> str:
        """Digest files, by path, that are known by one name."""
        states, newest = list[tuple[Any, ...]](), 0
        for path, stat in sorted(files):
            try:
                found = stat()
            except OSError:
                states.append((path,))
                continue
            states.append((path, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino))
            newest = max(newest, found.st_mtime_ns, found.st_ctime_ns)
        state = _sum(repr(states).encode())
        known = self._seen.get(place) or self._known.get(place) or [None]
        if known[0] != state:
            known = [state, newest, _sum("".join(_content(path) for path, *_ in states).encode())]
        self._seen[place] = known
        return str(known[-1])


def _content(path: str) -> str:
    try:
        return _sum(Path(path).read_bytes())
    except OSError:
        return "absent"


def _sum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _below(folder: str) -> Iterator[tuple[str, Stat]]:
    """Yield the sources in a folder and those below it, by path."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(_SUFFIXES):
                yield entry.path, entry.stat
            elif entry.name != "__pycache__" and entry.is_dir():
                yield from _below(entry.path)


def _names_of_modules(module: Any) -> Iterator[str]:
    """Yield the modules that a module names, and those of what it names."""
    for value in list(vars(module).values()):
        name = (
            value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        )
        if isinstance(name, str):
            yield name


def _sources_of_module(module: Any) -> Iterator[str]:
    """Yield digests of the functions of a module that has no file, as that of a notebook."""
    values = list(vars(module).values()) if module else []
    found = [value for value in values if getattr(value, "__module__", None) == module.__name__]
    yield from (code_digest(each.__code__) for value in found for each in functions_of(value))
