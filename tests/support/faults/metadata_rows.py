"""Rows of faults in the metadata of a distribution: its files, its entry points, its requirements."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from conftest import Site
from support.faults.planting import PLUGIN, Fault, info

POINTS = "[opgraft.plugins]\nacme = acme\n"
METADATA = "Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n"


def in_file(name: str, make: Callable[[Path], object]) -> Callable[[Site], None]:
    """Plant a plugin in order, one file of whose metadata is made anew."""

    def plant(site: Site) -> None:
        site.plugin("acme", PLUGIN)
        (info(site) / name).unlink()
        make(info(site) / name)

    return plant


def text(content: str | bytes) -> Callable[[Path], object]:
    """What writes a file of that content."""
    return lambda path: path.write_bytes(content.encode() if isinstance(content, str) else content)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def loop(path: Path) -> None:
    path.symlink_to(path)


def nothing(path: Path) -> None:
    """Leave the file out."""


MARK = "begins with a byte-order mark, which hides its first line: save it as UTF-8 without"


def _files() -> dict[str, Fault]:
    """Each way in which a file is none that can be read, of entry_points.txt and of METADATA."""
    rows = {}
    for name, content in (("entry_points.txt", POINTS), ("METADATA", METADATA)):
        for kind, make, words in (
            ("is a pipe", os.mkfifo, f"{name} cannot be read: it is no regular file"),
            ("is a device", device, f"{name} cannot be read: it is no regular file"),
            ("is a folder", Path.mkdir, f"{name} cannot be read: Is a directory"),
            (
                "is a link to itself",
                loop,
                f"{name} cannot be read: Too many levels of symbolic links",
            ),
            (
                "has 50 MB of rows",
                text(content + "#" * 79 + "\n" * (50 << 20)),
                f"{name} cannot be read: it is larger",
            ),
            ("begins with a mark", text(b"\xef\xbb\xbf" + content.encode()), f"{name} {MARK}"),
            ("is UTF-16", text(content.encode("utf-16")), f"{name} {MARK}"),
            ("is Latin-1", text(content.encode() + b"# \xfc\n"), f"{name} is not UTF-8"),
        ):
            rows[f"{name} {kind}"] = Fault(in_file(name, make), (words,))
    return rows


def points(content: str) -> Callable[[Site], None]:
    return in_file("entry_points.txt", text(content))


def metadata(content: str) -> Callable[[Site], None]:
    return in_file("METADATA", text(content))


def _misspelt(group: str, meant: str) -> Fault:
    return Fault(points(f"[{group}]\nacme = acme\n"), (f"group {group!r}: did you mean {meant!r}",))


EXPECTED = "in opgraft.plugins, expected 'name = package.module:object'"

POINT_ROWS = {
    "a section twice": Fault(
        points(POINTS + POINTS), ("the section [opgraft.plugins] of its entry", "is there twice")
    ),
    "a name twice": Fault(
        points(POINTS + "acme = acme:other\n"),
        ("'acme' in opgraft.plugins is there twice: acme counts",),
        "activated",
    ),
    "a name with a space": Fault(
        points("[opgraft.plugins]\nthe plugin = acme\n"), ("'the plugin = acme'", EXPECTED)
    ),
    "a name of another script": Fault(
        points("[opgraft.plugins]\n插件 = acme\n"), ("'插件 = acme'", EXPECTED)
    ),
    "a name with an escape": Fault(
        points("[opgraft.plugins]\na\x1b[31m = acme\n"), (r"'a\x1b[31m = acme'", EXPECTED)
    ),
    "no module": Fault(
        points("[opgraft.plugins]\nacme = :plugin\n"), ("'acme = :plugin'", EXPECTED)
    ),
    "no value": Fault(points("[opgraft.plugins]\nacme =\n"), ("'acme ='", EXPECTED)),
    "no equals sign": Fault(
        points("[opgraft.plugins]\nacme\n"), ("'acme' in opgraft.plugins", EXPECTED)
    ),
    "a path for a module": Fault(
        points("[opgraft.plugins]\nacme = acme/plugin.py\n"),
        ("'acme = acme/plugin.py' in", EXPECTED),
    ),
    "the module of the program": Fault(
        points("[opgraft.plugins]\nacme = __main__:x\n"), ("'acme = __main__:x'", EXPECTED)
    ),
    "extras": Fault(points("[opgraft.plugins]\nacme = acme [fast]\n"), (), "activated"),
    "a module that is not there": Fault(
        points("[opgraft.plugins]\nacme = acme_kernels\n"), (), "failed"
    ),
    "an object that is not there": Fault(
        points("[opgraft.plugins]\nacme = acme:plugin\n"), (), "failed"
    ),
    "a section that does not end": Fault(
        points("[opgraft.plugins\nacme = acme\n"),
        ("the section [opgraft.plugins of its", "does not end"),
    ),
    "rows before any section": Fault(points(f"acme = acme\n{POINTS}"), (), "activated"),
    "Windows line ends": Fault(points(POINTS.replace("\n", "\r\n")), (), "activated"),
    "no last line end": Fault(points(POINTS.rstrip()), (), "activated"),
    "nothing in it": Fault(points("")),
    "comments alone": Fault(points("# [opgraft.plugins]\n# acme = acme\n")),
    "another distribution's name": Fault(
        points("[opgraft.plugins]\nbrix = acme\n"),
        ("'brix' in opgraft.plugins has the name of the distribution brix",),
    ),
    "a built-in platform's name": Fault(
        points("[opgraft.platforms]\ncpu = acme:SPEC\n"),
        ("'cpu' in opgraft.platforms is already provided by opgraft",),
    ),
    "20,000 rows": Fault(
        points(POINTS + "".join(f"acme_{number} = acme\n" for number in range(20_000))),
        ("more than 1,000 entry points",),
    ),
    **{
        f"the group {group}": _misspelt(group, meant)
        for group, meant in {
            "opgraft.plugin": "opgraft.plugins",
            "opgraft_plugins": "opgraft.plugins",
            "opgraft-plugins": "opgraft.plugins",
            "Opgraft.Plugins": "opgraft.plugins",
            "opgraft.platform": "opgraft.platforms",
            "opgrafts.platforms": "opgraft.platforms",
        }.items()
    },
}

METADATA_ROWS = {
    "no METADATA": Fault(in_file("METADATA", nothing), ("it has no METADATA",)),
    "METADATA is empty": Fault(metadata(""), ("it has no METADATA",)),
    "no name": Fault(
        metadata("Metadata-Version: 2.1\nVersion: 1.0\n"), ("its METADATA has no Name",)
    ),
    "no version": Fault(
        metadata("Metadata-Version: 2.1\nName: acme\n"), ("its METADATA has no Version",)
    ),
    "an empty name": Fault(metadata("Name:  \nVersion: 1\n"), ("its METADATA has no Name",)),
    "a name of a million characters": Fault(
        metadata(f"Name: {'a' * 1_000_000}\nVersion: 1\n"),
        ("the Name in its METADATA has more than 200 characters",),
    ),
    "a version of a million characters": Fault(
        metadata(f"Name: acme\nVersion: {'1' * 1_000_000}\n"),
        ("the Version in its METADATA has more than 200",),
    ),
    "a version that is none": Fault(metadata("Name: acme\nVersion: latest\n"), (), "activated"),
    "the name twice": Fault(metadata("Name: acme\nName: acme2\nVersion: 1\n"), (), "activated"),
    "a description of 3 MB": Fault(metadata(f"{METADATA}\n{'word ' * 600_000}"), (), "activated"),
    "a NUL in the name": Fault(
        metadata("Name: ac\0me\nVersion: 1\n"), (r"the Name in its METADATA is 'ac\x00me'",)
    ),
    "a joiner in the name": Fault(
        metadata("Name: ac\u200dme\nVersion: 1\n"), (r"is 'ac\u200dme', as none may be",)
    ),
    "a name that is a command": Fault(
        metadata("Name: acme'; rm x\nVersion: 1\n"), ("as none may be spelled",)
    ),
    "a version that is a command": Fault(
        metadata("Name: acme\nVersion: 1; rm x\n"), ("the Version in its METADATA is",)
    ),
}


def _requires(line: str, words: str = "", status: str | None = "rejected") -> Fault:
    return Fault(
        lambda site: site.plugin("acme", PLUGIN, requires=[line]), (words,) if words else (), status
    )


REQUIREMENT_ROWS = {
    line: _requires(line, words)
    for line, words in {
        "opgraft=>0.1": "its requirement 'opgraft=>0.1' is malformed",
        "opgraft >=": "its requirement 'opgraft >=' is malformed",
        "opgraft (>=0.1": "its requirement 'opgraft (>=0.1' is malformed",
        "opgraft>=0.1; python": "its requirement 'opgraft>=0.1; python' is malformed",
        "opgraft>=0.1; colour == 'red'": "its requirement \"opgraft>=0.1; colour == 'red'\" is malformed",
        "opgraft>=99": "it requires 'opgraft>=99', this is opgraft",
        "opgraft<0.0.1": "it requires 'opgraft<0.0.1', this is opgraft",
        "OpGraft>=99": "it requires 'OpGraft>=99', this is opgraft",
        "opgraft[cuda]>=99": "it requires 'opgraft[cuda]>=99', this is opgraft",
        "opgraft (>=99)": "it requires 'opgraft (>=99)', this is opgraft",
        "opgraft==1.0.0garbage!": "is malformed",
        "opgraft; os_name ~= 'posix'": "its requirement \"opgraft; os_name ~= 'posix'\" is malformed",
        "opgraft; 'cuda' in extras": "its requirement \"opgraft; 'cuda' in extras\" is malformed",
    }.items()
} | {
    line: _requires(line, status="activated")
    for line in (
        "opgraft",
        "opgraft>=0.0.1",
        "opgraft>=99; python_version < '3'",
        "opgraft>=99; extra == 'test'",
        "opgraft @ https://example.org/opgraft.whl",
        "opgraft-acme>=99",
        "???",
        "",
    )
}

ROWS = {
    **_files(),
    **POINT_ROWS,
    **METADATA_ROWS,
    **{f"Requires-Dist: {k}": v for k, v in REQUIREMENT_ROWS.items()},
}
