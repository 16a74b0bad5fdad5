"""Digests of the source files of packages and modules, for the key of compiled code."""

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
"""Nanoseconds after a change of a file; a later change would have another time."""

_MOST = 1 << 14
"""The largest number of packages and modules in an index."""

_LARGEST = 1 << 24
"""The largest number of bytes of an index."""

Stat: TypeAlias = Callable[[], os.stat_result]


class Sources:
    """Digests of packages and modules.

    An index keeps digests for other processes. A digest holds as long as all files keep size and
    time.

    Args:
        index: the file of the index. Without an index, all files are read.
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
        """Write the index, if a digest is new."""
        settled = time.time_ns() - _SETTLED
        kept = {}
        for place, found in self._seen.items():
            if self._known.get(place) == found:
                continue
            _, newest, _ = found
            # A file may change again within the resolution of the clock.
            if newest < settled:
                kept[place] = found
        if self._index is None or not kept:
            return
        others = self._known if len(self._known) + len(kept) < _MOST else {}
        # On a full disk there is no index, and the files are read again.
        with contextlib.suppress(OSError):
            replace_file(self._index, json.dumps({**others, **kept}), 0o600)

    def package(self, name: str) -> str:
        """Return the digest of an imported package's sources, or of a single module's source."""
        if name not in self._packages:
            module = sys.modules.get(name)
            folders = [*getattr(module, "__path__", ())]
            files = [each for folder in folders for each in _below(folder)]
            if files:
                found = self._digest(os.pathsep.join(folders), files)
            else:
                found = self._module(module, getattr(module, "__file__", None))
            self._packages[name] = found
        return self._packages[name]

    def modules(self, names: Iterable[str]) -> Iterator[str]:
        """Yield a text for each module: name, version of the package, digest.

        Modules that a module of the user names follow. An installed package stands for its modules
        by the version. Modules of ``COVERED`` packages are left out.
        """
        pending = [*names]
        seen: set[str] = set()
        while pending:
            name = pending.pop()
            module = sys.modules.get(name)
            if name in seen or is_covered(name) or module is None:
                continue
            seen.add(name)
            package = sys.modules.get(name.partition(".")[0])
            version = getattr(package, "__version__", "")
            file = getattr(module, "__file__", None)
            yield f"{name} {version} {self._module(module, file)}"
            if is_own(name):
                pending += _names_of_modules(module)

    def _module(self, module: Any, file: str | None) -> str:
        if file:
            return self._digest(file, [(file, functools.partial(os.stat, file))])
        return _sum("".join(sorted(_sources_of_module(module))).encode())

    def _digest(self, place: str, files: Iterable[tuple[str, Stat]]) -> str:
        """Return the digest of some files.

        Args:
            place: the name of the digest in the index.
            files: paths, each with a function that returns size and times.
        """
        states: list[tuple[Any, ...]] = []
        newest = 0
        # Each file once: a folder of a package may lie below another one.
        for path, stat in sorted(dict(files).items()):
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
            contents = "".join(_digest_of_file(path) for path, *_ in states)
            known = [state, newest, _sum(contents.encode())]
        self._seen[place] = known
        return str(known[-1])


def _digest_of_file(path: str) -> str:
    try:
        return _sum(Path(path).read_bytes())
    except OSError:
        return "absent"


def _sum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _below(folder: str) -> Iterator[tuple[str, Stat]]:
    """Yield the source files in a folder and below, each with a function for size and times."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(_SUFFIXES):
                yield entry.path, entry.stat
            elif entry.name != "__pycache__" and entry.is_dir():
                yield from _below(entry.path)


def _names_of_modules(module: Any) -> Iterator[str]:
    """Yield the names of modules in a module's globals, and of the modules of its globals."""
    for value in list(vars(module).values()):
        is_module = isinstance(value, ModuleType)
        name = value.__name__ if is_module else getattr(value, "__module__", None)
        if isinstance(name, str):
            yield name


def _sources_of_module(module: Any) -> Iterator[str]:
    """Yield digests of the functions of a module without a file, such as a notebook."""
    values = list(vars(module).values()) if module else []
    for value in values:
        if getattr(value, "__module__", None) == module.__name__:
            for each in functions_of(value):
                yield code_digest(each.__code__)
