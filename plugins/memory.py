"""Messages to later processes: failures of plugins, and results of the doctor.

Each has a file in the user's folder of states, so that two writers at the same time lose none.
A file begins with a digest of the rest.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from importlib_metadata import Distribution
from opgraft.base.files import read_regular, replace_file, without_waiting
from opgraft.config.environment import state_home
from opgraft.plugins.metadata import text_of
from opgraft.plugins.records import digest_of

_LARGEST = 1 << 24  # bytes of a file
_BYTECODE = ".pyc"

State = tuple[str, int, int]
"""A file with its size and the time of its last change."""


@dataclass(frozen=True)
class Memory:
    """The files of one kind.

    Attributes:
        folder: the name of the folder.
        most: the number of files to keep; 0 keeps all.
    """

    folder: str
    most: int = 0

    def path(self, name: str) -> Path:
        """Return the place of a file.

        Raises:
            RuntimeError: nobody knows where the home folder is.
        """
        # An argument has surrogates for bytes that are no UTF-8.
        file = quote(name, safe="", errors="surrogatepass")
        return state_home() / "opgraft" / self.folder / f"{file}.json"

    def read(self, name: str) -> dict[str, Any] | None:
        """Return the content of a file, ``None`` if there is none.

        Raises:
            OSError, ValueError, RecursionError: the file cannot be used.
        """
        try:
            content = read_regular(self.path(name), _LARGEST)
        except (FileNotFoundError, NotADirectoryError, RuntimeError):
            return None
        # A disk may have lost a part of the file, or somebody may have edited the file.
        digest, _, text = content.partition(b"\n")
        if digest.decode() != _hash(text):
            raise ValueError("it is not as it was written")
        data = json.loads(text)
        if not isinstance(data, dict):
            raise ValueError(f"it holds a {type(data).__name__}, expected an object")
        return data

    def write(self, name: str, data: Mapping[str, Any]) -> None:
        """Write a file in one step, and remove the oldest files beyond ``most``.

        Raises:
            OSError: the file cannot be written.
            RuntimeError: nobody knows where the home folder is.
        """
        path = self.path(name)
        # Only for the user: a report may quote variables and paths.
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        text = json.dumps(data)
        replace_file(path, f"{_hash(text.encode())}\n{text}", 0o600)
        if self.most:
            # Each change of a driver, a plugin or a setting makes a new file.
            with suppress(FileNotFoundError):  # another process removes the oldest as well
                self._prune(path.parent)

    def _prune(self, folder: Path) -> None:
        # Other files are unfinished ones of other processes.
        by_age = sorted(folder.glob("*.json"), key=os.path.getmtime, reverse=True)
        for old in by_age[self.most :]:
            old.unlink()

    def forget(self, name: str) -> None:
        """Remove a file, if there is one.

        Raises:
            OSError: the file cannot be removed.
        """
        try:
            self.path(name).unlink()
        except (FileNotFoundError, NotADirectoryError, RuntimeError):
            return


def files_of(distribution: Distribution) -> list[str]:
    """Return the files in the RECORD of a distribution, without compiled bytecode.

    Raises:
        OSError, ValueError, csv.Error: the RECORD cannot be read.
    """
    record = text_of(distribution, "RECORD") or ""
    rows = [row for row in csv.reader(record.splitlines()) if row]
    return [str(distribution.locate_file(row[0])) for row in rows if not row[0].endswith(_BYTECODE)]


def states_of(files: Iterable[str]) -> list[State]:
    """Return the states of files. A missing file has a size of -1.

    Raises:
        OSError: a state cannot be read.
    """
    states = []
    for file in files:
        try:
            found = os.stat(file)
            states.append((file, found.st_size, found.st_mtime_ns))
        except FileNotFoundError:
            states.append((file, -1, 0))
    return states


def digest_of_content(distribution: Distribution) -> str:
    """Return a digest of the RECORD and the files of a distribution.

    Raises:
        OSError, csv.Error: the RECORD or a file cannot be read.
        ValueError: likewise, or there is no RECORD.
    """
    record = text_of(distribution, "RECORD")
    if not record:
        # The metadata alone stays the same in a repair.
        raise ValueError("it has no RECORD of its files")
    digests = [digest_of_text(record)]
    digests += map(_digest_of_file, files_of(distribution))
    return digest_of_text("\n".join(digests))


def _digest_of_file(path: str) -> str:
    try:
        with open(path, "rb", opener=without_waiting) as file:
            return digest_of(file).hex()
    except FileNotFoundError:
        # A missing file is a part of the content, an unreadable one is not known.
        return "no file"


def digest_of_text(text: str) -> str:
    """Return a digest of a text, with surrogates or without."""
    return _hash(text.encode(errors="surrogatepass"))


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
