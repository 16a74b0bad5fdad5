"""Metadata of the installed distributions, read with limits: it is written by everybody, and may be anything."""

from __future__ import annotations

import os
import pkgutil
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from itertools import groupby, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import importlib_metadata
from opgraft.base.files import read_regular
from opgraft.base.text import described
from opgraft.errors import PluginError
from opgraft.registry.decision import Provider

LARGEST = MappingProxyType({"entry_points.txt": 1 << 20, "RECORD": 1 << 26})
"""Bytes of a file; of others ``_LARGEST``."""

_LARGEST = 1 << 22
_LONGEST = 200  # characters of a name or version
_MOST = 10_000  # distributions of a finder
_FAULTS = ("does not end", "is there twice")
_LINE = re.compile(r"([^\r\n]*)(?:\r\n|\r|\n|$)")
_SPELLED = {
    "Name": re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?"),
    "Version": re.compile(r"[A-Za-z0-9.!+_-]+"),
}
"""The spelling of names and versions, which stand in reports, and in commands that are shown to be pasted."""
_GROUP = re.compile(r"^\s*\[([^\]\n]+)\]\s*$", re.M)


@dataclass(frozen=True)
class Problem:
    """Metadata that cannot be used, and why.

    Attributes:
        provider: whose it is; its place if not even the name can be read.
        reason: with the next step.
        location: ``file:line``, if one line tells.
    """

    provider: Provider
    reason: str
    location: str | None = None


def distributions() -> Iterator[importlib_metadata.Distribution | Problem]:
    """Yield the distributions that can be found, and a problem for each finder that does not let itself be asked."""
    context: Any = importlib_metadata.DistributionFinder.Context
    # As imports look there. What is not there would be taken for an archive, which takes milliseconds to find out.
    everything = context(
        path=[
            entry for entry in sys.path if isinstance(entry, str) and os.path.exists(entry or ".")
        ]
    )
    for finder in list(sys.meta_path):
        find = getattr(
            finder, "find_distributions", None
        )  # which a finder may have, as importlib.metadata asks
        if find is None:
            continue
        try:
            number = 0
            # By folder, as on sys.path, and by name within one: the order of a listing is another on each machine.
            for _, found in groupby(
                islice(find(everything), _MOST), lambda each: _place(each).rpartition(os.sep)[0]
            ):
                for distribution in sorted(found, key=_place):
                    number += 1
                    yield distribution
            if number == _MOST:
                raise ValueError(f"it has more than {_MOST:,} distributions")
        except (Exception, SystemExit) as error:  # somebody's code
            name = f"{type(finder).__module__}.{type(finder).__qualname__}"
            yield Problem(
                Provider(name), f"this finder on sys.meta_path cannot be asked: {described(error)}"
            )


def place_of(distribution: importlib_metadata.Distribution) -> Path | None:
    """Return the folder of a distribution's metadata, ``None`` of one that lies in no folder of the file system."""
    path = getattr(distribution, "_path", None)  # for which importlib-metadata has no public name
    return path if isinstance(path, Path) else None


def _place(distribution: importlib_metadata.Distribution) -> str:
    return str(place_of(distribution) or "")


def text_of(distribution: importlib_metadata.Distribution, name: str) -> str | None:
    """Return a file of a distribution's metadata, ``None`` where there is none.

    Raises:
        ValueError: it is no text, no regular file or too large.
        OSError: it cannot be read.
    """
    place = place_of(distribution)
    if place is None:
        return distribution.read_text(name)
    try:
        content = read_regular(
            os.path.join(place, name), LARGEST.get(name, _LARGEST)
        )  # a Path would take longer
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, OSError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ValueError(f"{name} cannot be read: {why}") from error
    if content.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        raise ValueError(
            f"{name} begins with a byte-order mark, which hides its first line: save it as UTF-8 without"
        )
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8: {error}") from error


def fields_of(distribution: importlib_metadata.Distribution) -> dict[str, list[str]]:
    """Return the fields of a distribution's metadata, the values of each by its name in lower case.

    The long description is left out, which would take long. So would the import of ``email``, whose format this is.

    Raises:
        ValueError: there is none, or it has no name or version.
    """
    text = text_of(distribution, "METADATA") or text_of(distribution, "PKG-INFO")
    if not text:
        raise ValueError("it has no METADATA")
    fields: dict[str, list[str]] = {}
    last: list[str] = []
    for line in (found[1] for found in _LINE.finditer(text)):
        name, colon, value = line.partition(":")
        if line[:1] in (" ", "\t") and last:
            last[-1] += f"\n{line}"
        elif not colon or not name.strip():  # empty, as that before the description, or no field
            break
        else:
            last = fields.setdefault(name.lower(), [])
            last.append(value.strip())
    for field in ("Name", "Version"):
        value = fields.get(field.lower(), [""])[0]
        if not value.strip():
            raise ValueError(f"its METADATA has no {field}")
        if len(value) > _LONGEST:
            raise ValueError(f"the {field} in its METADATA has more than {_LONGEST} characters")
        if not _SPELLED[field].fullmatch(value):
            raise ValueError(f"the {field} in its METADATA is {value!a}, as none may be spelled")
    return fields


def groups_in(text: str) -> list[str]:
    """List the groups of a file of entry points, in its order."""
    return _GROUP.findall(text)


def entry_point_rows(text: str) -> Iterator[tuple[str, str]]:
    """Yield the rows of a file of entry points, each with its group.

    Raises:
        ValueError: a section does not end, or is there twice.
    """
    group, seen = "", set()
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("["):
            group = line.removeprefix("[").removesuffix("]")
            if not line.endswith("]") or group in seen:
                raise ValueError(
                    f"the section {line} of its entry_points.txt {_FAULTS[line.endswith(']')]}"
                )
            seen.add(group)
        elif not line.startswith("#"):
            yield group, line


def is_stray(distribution: importlib_metadata.Distribution) -> bool:
    """Tell whether metadata is what a build left in the working folder, from which Python was started by chance."""
    place = place_of(distribution)
    if place is None or place.suffix != ".egg-info":
        return False
    root, here = str(place.parent), os.path.abspath("")
    return os.path.abspath(root) == here and [os.path.abspath(entry) for entry in sys.path].count(
        here
    ) == 1 == (os.path.abspath(sys.path[0]) == here)


def specs_of(module: str) -> Iterator[ModuleSpec]:
    """Yield where a module and the packages above it would be imported from, those first, as far as they are there.

    Imports nothing. What is imported already, an import would return.

    Raises:
        PluginError: a finder on ``sys.meta_path`` raised.
    """
    name, folders = "", [entry for entry in sys.path if isinstance(entry, str)]
    for part in module.split("."):
        top, name = not name, f"{name}.{part}" if name else part
        loaded = getattr(sys.modules.get(name), "__spec__", None)
        spec = loaded if isinstance(loaded, ModuleSpec) else _found(name, folders, top)
        if spec is None:
            return
        yield spec
        folders = list(spec.submodule_search_locations or ())


def _found(name: str, folders: list[str], top: bool) -> ModuleSpec | None:
    """Ask the finders for a module in the order in which an import asks them."""
    for finder in list(sys.meta_path):
        spec = (
            _spec_in(name, folders)
            if finder is PathFinder
            else _asked(finder, name, None if top else folders)
        )
        if spec is not None:
            return spec
    return None


def _asked(finder: Any, name: str, folders: list[str] | None) -> ModuleSpec | None:
    """Ask a finder of somebody's for a module.

    Raises:
        PluginError: it raised, as it would at an import.
    """
    find = getattr(finder, "find_spec", None)  # which one of distributions alone has not
    try:
        found: ModuleSpec | None = find(name, folders) if find else None
    except Exception as error:
        whose = f"{type(finder).__module__}.{type(finder).__qualname__}"
        raise PluginError(
            f"the finder {whose} on sys.meta_path raised {described(error)} when asked for {name}"
        ) from error
    return found


def is_namespace(spec: ModuleSpec) -> bool:
    """Tell whether a specification is that of a namespace package, of which an import runs nothing."""
    own = (
        spec.loader is None or type(spec.loader).__module__ == "_frozen_importlib_external"
    )  # its name is no public one
    return own and spec.origin is None and spec.submodule_search_locations is not None


def _spec_in(name: str, folders: list[str]) -> ModuleSpec | None:
    """Find a module in folders; the finder would want the package above to be imported, where that is a namespace."""
    portions: list[str] = []
    for folder in folders:
        importer = pkgutil.get_importer(folder)
        spec = importer.find_spec(name) if importer else None
        if spec is not None and spec.loader is not None:
            return spec
        portions += (spec and spec.submodule_search_locations) or ()
    namespace = ModuleSpec(name, None, is_package=True)
    namespace.submodule_search_locations = portions
    return namespace if portions else None
