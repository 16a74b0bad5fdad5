"""Rows of faults in what is installed beside each other, and in those who find it."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from conftest import Site
from support.faults.planting import PLUGIN

Plant = Callable[[Site, pytest.MonkeyPatch], object]

POINTS = {"opgraft.plugins": ["acme = acme"]}
BRIX = {"opgraft.plugins": ["brix = acme"]}


def finder(find: Callable[[], Any]) -> Plant:
    """Plant a finder of distributions, which finds no module."""

    class Finder:
        def find_spec(self, *_: object) -> None:
            return None

        def find_distributions(self, context: object) -> Any:
            return find()

    return lambda site, patch: patch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])


def raises(error: BaseException) -> Callable[[], Any]:
    def find() -> Any:
        raise error

    return find


def found_then_raises() -> Iterator[Any]:
    yield from ()
    raise OSError("the disk is gone")


class Unreadable:
    """A distribution whose every answer is an error."""

    def read_text(self, name: str) -> str:
        raise RuntimeError("no disk")

    @property
    def metadata(self) -> Any:
        raise RuntimeError("no disk")


def on_path(entry: Any) -> Plant:
    """Put something in front of ``sys.path``; a text is a file of the test's folder."""

    def plant(site: Site, patch: pytest.MonkeyPatch) -> None:
        put = str(site.folder.parent / entry) if isinstance(entry, str) else entry
        patch.setattr(sys, "path", [put, *sys.path])

    return plant


def file_on_path(content: bytes) -> Plant:
    def plant(site: Site, patch: pytest.MonkeyPatch) -> None:
        (site.folder.parent / "file.zip").write_bytes(content)
        on_path("file.zip")(site, patch)

    return plant


def zipped(site: Site, patch: pytest.MonkeyPatch) -> None:
    """A plugin in order, in a zip archive."""
    with zipfile.ZipFile(site.folder.parent / "acme.zip", "w") as archive:
        archive.writestr("acme.py", PLUGIN)
        archive.writestr("acme-1.0.dist-info/METADATA", "Name: acme\nVersion: 1.0\n")
        archive.writestr("acme-1.0.dist-info/entry_points.txt", "[opgraft.plugins]\nacme = acme\n")
    on_path("acme.zip")(site, patch)


def two(folder: str, version: str) -> Plant:
    """Plant acme, and acme of a version in a folder that comes first."""

    def plant(site: Site, patch: pytest.MonkeyPatch) -> None:
        site.plugin("acme", PLUGIN)
        other = Site(site.folder.parent / folder)
        other.install("acme", {"acme.py": PLUGIN}, POINTS, version=version)
        if other.folder != site.folder:
            patch.syspath_prepend(str(other.folder))

    return plant


def stale(site: Site, patch: pytest.MonkeyPatch) -> None:
    """What a build leaves in the working folder, on the path as 'python -m' puts it there."""
    left = site.folder.parent / "source"
    (left / "acme.egg-info").mkdir(parents=True)
    (left / "acme.egg-info/PKG-INFO").write_text("Name: acme\nVersion: 1.0\n")
    (left / "acme.egg-info/entry_points.txt").write_text("[opgraft.plugins]\nacme = acme\n")
    (left / "acme.py").write_text(PLUGIN)
    patch.chdir(left)
    patch.setattr(sys, "path", [str(left), *sys.path])


def impostor(name: str, points: str) -> Plant:
    return lambda site, patch: site.install(name, {"acme.py": PLUGIN}, points)


def _of_python(site: Site, patch: pytest.MonkeyPatch) -> None:
    """Put the finder of the standard library, which finds what ours has found, in front."""
    patch.setattr(sys, "meta_path", [PathFinder, *sys.meta_path])


ASKED = "this finder on sys.meta_path cannot be asked: "
ANOTHER = (
    "it is another installation of acme {}, which comes first on sys.path: uninstall one of them"
)
OF_OURS = "it calls itself opgraft and offers acme, which is no part of opgraft: uninstall it, or give it a name"

ROWS: dict[str, tuple[Plant, tuple[str, ...], str | None]] = {
    "a finder that raises": (
        finder(raises(OSError("no disk"))),
        ("Finder", f"{ASKED}OSError: no disk"),
        None,
    ),
    "a finder that exits": (
        finder(raises(SystemExit(3))),
        ("Finder", f"{ASKED}SystemExit: 3"),
        None,
    ),
    "a finder that is interrupted": (
        finder(raises(KeyboardInterrupt())),
        ("Finder", f"{ASKED}PluginError: its code raised KeyboardInterrupt, which nobody has sent"),
        None,
    ),
    "a finder that raises later": (
        finder(found_then_raises),
        ("Finder", f"{ASKED}OSError: the disk is gone"),
        None,
    ),
    "a finder that returns nothing": (finder(lambda: None), ("Finder", f"{ASKED}TypeError"), None),
    "a finder that finds numbers": (
        finder(lambda: [3]),
        ("int: its plugin metadata is malformed: ",),
        None,
    ),
    "a finder without end": (
        finder(lambda: repeat(Unreadable())),
        ("Finder", "more than 10,000 distributions"),
        None,
    ),
    "a distribution that raises": (
        finder(lambda: [Unreadable()]),
        ("Unreadable", "RuntimeError: no disk"),
        None,
    ),
    "the finder of Python": (_of_python, (), None),
    "a folder that is not there": (on_path("nowhere"), (), None),
    "a path that is no text": (on_path(Path("/nowhere")), (), None),
    "a number on the path": (on_path(3), (), None),
    "nothing on the path": (on_path(None), (), None),
    "an empty zip archive": (file_on_path(b""), (), None),
    "a torn zip archive": (file_on_path(b"PK\x03\x04torn"), (), None),
    "a zipped plugin": (zipped, (), "activated"),
    "two versions in one folder": (
        two("site", "2.0"),
        ("acme 1.0", "left beside that of acme 2.0 in one folder", "it is the latest version"),
        "activated",
    ),
    "two versions in two folders": (two("other", "2.0"), (ANOTHER.format("2.0"),), "activated"),
    "the same version twice": (two("other", "1.0"), (), "activated"),
    "metadata that a build left": (stale, ("a build left it in the working folder",), None),
    "another opgraft": (impostor("opgraft", "[opgraft.plugins]\nacme = acme"), (OF_OURS,), None),
    "another OpGraft": (impostor("OpGraft", "[opgraft.plugins]\nacme = acme"), (OF_OURS,), None),
    "another opgraft with a platform": (
        impostor("opgraft", "[opgraft.platforms]\ncpu = acme"),
        ("it calls itself opgraft and offers acme",),
        None,
    ),
    "a rival of the same name": (
        impostor("acme-two", "[opgraft.plugins]\nbrix = acme"),
        ("'brix' in opgraft.plugins has the name of the distribution brix",),
        None,
    ),
}
"""By name: who plants it, the words that are told, and what becomes of the plugin acme."""
