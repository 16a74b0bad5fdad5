"""Rows of files that opgraft keeps for itself, as other processes and disks leave them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path


def content(text: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(text)


def with_digest(text: bytes) -> Callable[[Path], object]:
    """Write a file whose digest is right."""
    return content(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)


def huge(path: Path) -> None:
    """Write 100 MB, which take no room."""
    with path.open("wb") as file:
        file.truncate(100 << 20)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (content(b""), ""),
    "torn": (lambda path: path.write_bytes(path.read_bytes()[:-10]), ""),
    "binary": (content(b"\x80\x81{}"), "ecode"),  # codec can't decode, or UnicodeDecodeError
    "zeros": (content(b"\0" * 4096), ""),
    "a list": (content(b"[]"), ""),
    "text": (content(b'"text"'), ""),
    "no JSON": (content(b"{"), ""),
    "nested": (content(b"[" * 30_000), "ecursion"),
    "too large": (huge, "it is larger than"),
}
"""What a file of opgraft's own may hold, and words that are told of that, whichever file it is."""

NO_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe": (os.mkfifo, "no regular file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "no regular file"),
    "a folder": (Path.mkdir, "Is a directory"),
    "a link to itself": (lambda path: path.symlink_to(path), "symbolic links"),
}
"""Things in the place of such a file, and words likewise."""

ALL = {**BROKEN, **NO_FILES}

SIGNED: dict[str, tuple[Callable[[Path], object], str]] = {
    "edited": (
        lambda path: path.write_bytes(path.read_bytes().replace(b"1", b"2")),
        "it is not as it was written",
    ),
    "of another time": (with_digest(b'{"results": []}'), "unexpected keyword argument"),
    "a list with its digest": (with_digest(b"[]"), "it holds a list"),
    "no JSON with its digest": (with_digest(b"{"), "JSONDecodeError"),
    "nested, with its digest": (with_digest(b"[" * 100_000), "RecursionError"),
}
"""Likewise of a file that begins with a digest: a record of a quarantine, or a result of the doctor."""

WRITERS: dict[str, tuple[str, str]] = {
    "a lockfile": (
        "from opgraft.plugins.locking import LockedPackage\nfrom opgraft.plugins.making_locks import write_rows\n"
        "def write(n):\n    row = LockedPackage('acme', str(n), 'x' * 100_000, False)\n"
        "    write_rows(Path(folder, 'opgraft.lock'), [row])",
        "from opgraft.plugins.locking import read_rows\n"
        "def read(): return len(read_rows(folder + '/opgraft.lock')[0].files)",
    ),
    "a result of the doctor": (
        "from opgraft.cli.kept_results import keep\ndef write(n): keep('acme', {'n': n, 'x': 'x' * 100_000})",
        "from opgraft.cli.kept_results import look_up\n"
        "def read():\n    found = look_up('acme')\n    return len(found.report['x'])",
    ),
    "measurements": (
        "from opgraft.registry.decision import Provider\n"
        "from opgraft.binding.measurements import OpMeasurement, ProfileFile, TimedChoice\n"
        "timed = tuple(TimedChoice(name, Provider(name, '1'), 'kernel', {'shape': 1.0}) for name in 'ab')\n"
        "def write(n):\n    row = OpMeasurement('a', 1, 'x' * 100_000, timed)\n"
        "    ProfileFile(Path(folder, 'tuning.json')).add({'op': row})",
        "from opgraft.binding.measurements import read_profile\n"
        "def read():\n    (ops,) = read_profile(Path(folder, 'tuning.json')).values()\n    return len(ops['op'].when)",
    ),
    "a record of a quarantine": (
        "from opgraft.plugins.quarantine import confine\nfrom opgraft.registry.decision import Provider\n"
        "def write(n): assert 'from now on' in confine(Provider('acme', '1.0'), 'x' * 1000)",
        "from opgraft.plugins.quarantine import read as of\ndef read(): return 100 * len(of('acme').what)",
    ),
}
"""Code that writes a file anew, and code that reads it: 100,000 is what a whole one gives."""
