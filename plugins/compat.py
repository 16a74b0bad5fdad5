"""The public names of opgraft that a plugin uses, and what became of them. Imports nothing of the plugin."""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from opgraft.errors import close_matches
from opgraft.files import read_regular
from opgraft.plugins.api_use import HOST, Use, keywords_of, uses_in
from opgraft.plugins.discovery import Offer, discover
from opgraft.plugins.listing import Listing
from opgraft.plugins.metadata import place_of, text_of
from opgraft.text import described

PUBLIC, PRIVATE, DEPRECATED, CHANGED, GONE = "public", "private", "deprecated", "changed", "gone"
_LARGEST = 1 << 22  # bytes of a source file
_UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    RecursionError,
    MemoryError,
    csv.Error,
)  # of parsers too


@dataclass(frozen=True)
class TouchedName:
    """A name of opgraft that a plugin uses.

    Attributes:
        name: as the listing has it, or as the plugin writes it where that has none.
        status: one of the words above.
        reason: why, and what to do; empty of a public name.
        locations: ``file:line`` of each use.
    """

    name: str
    status: str
    reason: str
    locations: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "locations": list(self.locations)}


@dataclass(frozen=True)
class Examination:
    """The names that a plugin uses, and the files of it that could not be read, each with the reason."""

    names: tuple[TouchedName, ...]
    unread: tuple[tuple[str, str], ...]


def examine(offers: Iterable[Offer], here: Listing, there: Listing) -> Examination:
    """Judge the names that plugins use in opgraft as it is ``here`` by those that there are ``there``."""
    found: dict[tuple[str, str, str], list[str]] = {}
    files, unread = _sources(offers)
    exported: dict[str, list[str]] = {}
    for name in here.names:
        module, _, own = name.rpartition(".")
        if module in here.modules:
            exported.setdefault(module, []).append(own)
    for file in files:
        try:
            judged = [
                (_judged(use, here, there), use.line)
                for use in uses_in(read_regular(file, _LARGEST), exported)
            ]
        except _UNREADABLE as error:
            unread.append((str(file), described(error)))
            continue
        for key, line in judged:
            found.setdefault(key, []).append(f"{file}:{line}")
    rows = [
        TouchedName(*key, tuple(dict.fromkeys(places))) for key, places in sorted(found.items())
    ]
    return Examination(tuple(rows), tuple(unread))


def _sources(offers: Iterable[Offer]) -> tuple[list[Path], list[tuple[str, str]]]:
    """List the source files of distributions, and of the packages that their entry points name; and unread RECORDs."""
    files: set[Path] = set()
    unread: dict[str, str] = {}
    for offer in offers:
        try:
            files |= set(_recorded(offer))
        except _UNREADABLE as error:
            unread[f"RECORD of {offer.provider}"] = described(error)
        files |= set(_of_package(offer.module.partition(".")[0]))
    return sorted(files), list(unread.items())


def _recorded(offer: Offer) -> Iterator[Path]:
    distribution = discover().distributions.get(offer.provider)
    place = place_of(distribution) if distribution else None
    if distribution is None or place is None:
        return
    for row in csv.reader((text_of(distribution, "RECORD") or "").splitlines()):
        path = place.parent.joinpath(*row[:1])
        if path.suffix == ".py" and path.is_file():
            yield path.resolve()


def _of_package(package: str) -> Iterator[Path]:
    """Yield the files of a package at the top, which is looked up without an import."""
    spec = importlib.util.find_spec(package) if package != HOST else None
    for folder in (spec and spec.submodule_search_locations) or ():
        yield from (path.resolve() for path in Path(folder).rglob("*.py") if path.is_file())
    if spec and not spec.submodule_search_locations and (spec.origin or "").endswith(".py"):
        yield Path(str(spec.origin)).resolve()


def _judged(use: Use, here: Listing, there: Listing) -> tuple[str, str, str]:
    """Return the name that is used, its status, and why."""
    known = there.find(use.name)
    ends = there.deprecation(use.name)
    if ends:
        return use.name, DEPRECATED, ends
    if use.name in there.modules or use.name == HOST:
        return use.name, PUBLIC, ""
    before = here.find(use.name)
    if known is None:
        return _unknown(use.name, before is not None, here, there)
    if before is not None and before != known and before not in there.names:
        return before, GONE, f"opgraft {here.version} has it, {there.version} has not"
    was, now = here.signature(known) if known in here.names else "", there.signature(known)
    if was and was != now:
        return (
            known,
            CHANGED,
            f"it takes {was} in opgraft {here.version} and {now} in {there.version}",
        )
    # Of a member that is not ours the class is known, and not how the member is called.
    taken = keywords_of(now) if known.rpartition(".")[2] == use.name.rpartition(".")[2] else None
    wrong = [keyword for keyword in use.keywords if taken is not None and keyword not in taken]
    if wrong:
        return (
            known,
            CHANGED,
            f"it is called with {wrong[0]}=, and takes {now} in opgraft {there.version}",
        )
    return known, PUBLIC, ""


def _unknown(name: str, was_there: bool, here: Listing, there: Listing) -> tuple[str, str, str]:
    if was_there:
        return name, GONE, f"opgraft {here.version} has it, {there.version} has not"
    parts = name.split(".")
    modules = [
        known
        for known in (".".join(parts[:count]) for count in range(len(parts), 1, -1))
        if _is_module(known)
    ]
    if modules and modules[0] not in there.modules:
        return name, PRIVATE, "no part of the public API: it may change without notice"
    owner, _, own = name.rpartition(".")
    if owner in there.modules:
        names = [
            each.rpartition(".")[2] for each in there.names if each.rpartition(".")[0] == owner
        ]
        return (
            name,
            GONE,
            f"{owner} of opgraft {there.version} has no {own}: {close_matches(own, names)}",
        )
    return name, GONE, f"opgraft {there.version} has no such name"


def _is_module(name: str) -> bool:
    """Tell whether a module of that name is part of this opgraft; nothing is imported."""
    path = Path(__file__).parents[1].joinpath(*name.split(".")[1:])
    return path.is_dir() or path.with_suffix(".py").is_file()
