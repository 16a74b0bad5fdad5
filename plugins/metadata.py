"""Metadata of the installed distributions, read with limits: the metadata may be anything."""

from __future__ import annotations

import os
import pkgutil
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from opgraft.registry.watching import own_interrupts_as_errors, told_when_late

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
"""The spelling of names and versions. Reports and commands to be pasted quote them."""
_GROUP = re.compile(r"^\s*\[([^\]\n]+)\]\s*$", re.M)


@dataclass(frozen=True)
class Problem:
    """Unusable metadata.

    Attributes:
        provider: the distribution, or the folder if the name is unreadable.
        reason: with the next step.
        location: ``file:line``, if one line tells.
    """

    provider: Provider
    reason: str
    location: str | None = None


def distributions(
    name: str | None = None,
) -> Iterator[importlib_metadata.Distribution | Problem]:
    """Yield the installed distributions, and a problem for each failing finder.

    Args:
        name: of the wanted distributions, ``None`` for all.
    """
    context: Any = importlib_metadata.DistributionFinder.Context
    entries = [entry for entry in sys.path if isinstance(entry, str)]
    # A missing entry would be taken for an archive, and that takes milliseconds.
    there = [entry for entry in entries if os.path.exists(entry or ".")]
    wanted = context(name=name, path=there)
    for finder in list(sys.meta_path):
        # Which a finder may have, as importlib.metadata asks.
        find = getattr(finder, "find_distributions", None)
        if find is None:
            continue
        listed: list[importlib_metadata.Distribution] = []
        failure: BaseException | None = None
        try:
            with _told_when_late(finder, "distributions"), own_interrupts_as_errors():
                listed.extend(islice(find(wanted), _MOST))
            if len(listed) == _MOST:
                raise ValueError(f"it has more than {_MOST:,} distributions")
        except (Exception, SystemExit) as error:  # somebody's code
            failure = error
        try:
            yield from _in_order(listed)
        except Exception as error:  # a distribution is somebody's code, too
            failure = error
        if failure is not None:
            reason = f"this finder on sys.meta_path cannot be asked: {described(failure)}"
            yield Problem(Provider(_name_of(finder)), reason)


def _in_order(
    listed: Sequence[importlib_metadata.Distribution],
) -> list[importlib_metadata.Distribution]:
    """Sort distributions by folder, as on ``sys.path``, then by name."""
    # Each machine lists a folder in an order of its own.
    folders = groupby(listed, lambda each: _place(each).rpartition(os.sep)[0])
    return [each for _, found in folders for each in sorted(found, key=_place)]


def _told_when_late(finder: Any, wanted: str) -> AbstractContextManager[None]:
    """Log a warning if a finder takes long. The finders of Python itself are not watched."""
    name = _name_of(finder)
    package = name.partition(".")[0]
    if package in sys.stdlib_module_names or package == importlib_metadata.__name__:
        return nullcontext()
    what = f"the finder {name} on sys.meta_path, asked for {wanted}"
    return told_when_late(what, None, advice=f"Uninstall the distribution that adds {name}.")


def _name_of(finder: Any) -> str:
    cls = finder if isinstance(finder, type) else type(finder)
    return f"{cls.__module__}.{cls.__qualname__}"


def place_of(distribution: importlib_metadata.Distribution) -> Path | None:
    """Return the folder of a distribution's metadata, ``None`` outside of the file system."""
    path = getattr(distribution, "_path", None)  # for which importlib-metadata has no public name
    return path if isinstance(path, Path) else None


def _place(distribution: importlib_metadata.Distribution) -> str:
    return str(place_of(distribution) or "")


def text_of(distribution: importlib_metadata.Distribution, name: str) -> str | None:
    """Return a file of a distribution's metadata, ``None`` where there is none.

    Raises:
        ValueError: the file is no text, no regular file or too large.
        OSError: the file cannot be read.
    """
    place = place_of(distribution)
    if place is None:
        return distribution.read_text(name)
    try:
        # A Path would take longer.
        content = read_regular(os.path.join(place, name), LARGEST.get(name, _LARGEST))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, OSError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ValueError(f"{name} cannot be read: {why}") from error
    if content.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        raise ValueError(
            f"{name} begins with a byte-order mark, which hides its first line: save it as UTF-8 "
            "without"
        )
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8: {error}") from error


def fields_of(distribution: importlib_metadata.Distribution) -> dict[str, list[str]]:
    """Return the fields of a distribution's metadata, the values by name in lower case.

    The long description is left out, as reading takes long. So would the import of ``email``, which
    has this format.

    Raises:
        ValueError: there is no metadata, or no name or version.
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
    # Both become parts of messages and of paths.
    for field in ("Name", "Version"):
        _expect_spelled(field, fields.get(field.lower(), [""])[0])
    return fields


def _expect_spelled(field: str, value: str) -> None:
    """Check the name or the version of a distribution.

    Raises:
        ValueError: the value is empty, too long, or spelled as no name or version.
    """
    if not value.strip():
        raise ValueError(f"its METADATA has no {field}")
    if len(value) > _LONGEST:
        raise ValueError(f"the {field} in its METADATA has more than {_LONGEST} characters")
    if not _SPELLED[field].fullmatch(value):
        raise ValueError(f"the {field} in its METADATA is {value!a}, as none may be spelled")


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
    """Return True for metadata left by a build in the working folder."""
    place = place_of(distribution)
    if place is None or place.suffix != ".egg-info":
        return False
    here = os.path.abspath("")
    if os.path.abspath(str(place.parent)) != here:
        return False
    # Python puts the working folder first. A second entry is a wish of the user.
    entries = [os.path.abspath(entry) for entry in sys.path]
    return entries[0] == here and entries.count(here) == 1


def specs_of(module: str) -> Iterator[ModuleSpec]:
    """Yield the specifications of a module and, before, of the packages above, if found.

    Nothing is imported. An imported module keeps its specification.

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
    """Ask the finders for a module in the order of an import."""
    for finder in list(sys.meta_path):
        above = None if top else folders
        is_by_path = finder is PathFinder
        spec = _spec_in(name, folders) if is_by_path else _asked(finder, name, above)
        if spec is not None:
            return spec
    return None


def _asked(finder: Any, name: str, folders: list[str] | None) -> ModuleSpec | None:
    """Ask a finder for a module.

    Raises:
        PluginError: the finder raised.
    """
    find = getattr(finder, "find_spec", None)  # which one of distributions alone has not
    try:
        with _told_when_late(finder, name):
            found: ModuleSpec | None = find(name, folders) if find else None
    except Exception as error:
        whose = _name_of(finder)
        raise PluginError(
            f"the finder {whose} on sys.meta_path raised {described(error)} when asked for {name}"
        ) from error
    return found


def is_namespace(spec: ModuleSpec) -> bool:
    """Return True for a namespace package. Its import runs nothing."""
    # The class of such a loader has no public name.
    own = spec.loader is None or type(spec.loader).__module__ == "_frozen_importlib_external"
    return own and spec.origin is None and spec.submodule_search_locations is not None


def _spec_in(name: str, folders: list[str]) -> ModuleSpec | None:
    """Find a module in folders. The finder itself needs an imported package above a namespace."""
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
