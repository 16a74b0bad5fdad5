"""Record the files and variables of probes in a folder, for a bug report or a test."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from opgraft.errors import InputError
from opgraft.machine.machine import RECORD, Machine, torch_data, without_secrets
from opgraft.machine.scrubbing import Scrubber


@dataclass
class _SeenVariables(Mapping[str, str]):
    """The environment. It notes the variables that were asked for."""

    variables: Mapping[str, str]
    seen: set[str] = field(default_factory=set)

    def __getitem__(self, name: str) -> str:
        self.seen.add(name)
        return self.variables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.variables)

    def __len__(self) -> int:
        return len(self.variables)


@dataclass
class SeenRequests:
    """The requests of probes.

    Attributes:
        variables: the environment, with the names that were looked up.
        files: path → text, ``None`` for an unreadable file.
        listed: existing paths.
        folders: readable folders.
        links: path → last part of the link's target, ``None`` if there is no link.
        denied: existing paths without permission to open.
        packages: installed distribution → version.
    """

    variables: _SeenVariables
    files: dict[str, str | None] = field(default_factory=dict)
    listed: set[str] = field(default_factory=set)
    folders: set[str] = field(default_factory=set)
    links: dict[str, str | None] = field(default_factory=dict)
    denied: set[str] = field(default_factory=set)
    packages: dict[str, str] = field(default_factory=dict)


class RecordingMachine(Machine):
    """A machine that notes the requests of probes, so that ``write`` records exactly these."""

    seen: SeenRequests

    def __init__(self, machine: Machine) -> None:
        environ = _SeenVariables(machine.environ)
        super().__init__(machine.root, environ, machine.packages, machine.torch, machine.denied)
        # A machine is frozen, but the requests grow.
        object.__setattr__(self, "seen", SeenRequests(environ))

    def variables(self) -> dict[str, str]:
        # Variables for a child process are no request of a probe.
        return without_secrets(self.seen.variables.variables)

    def read(self, path: str) -> str | None:
        text = self.seen.files[path] = super().read(path)
        return text

    def names(self, folder: str) -> list[str]:
        names = super().names(folder)
        self.seen.listed.update(f"{folder}/{name}" for name in names)
        return names

    def unlisted(self, folder: str) -> str | None:
        why = super().unlisted(folder)
        if why is None:
            self.seen.folders.add(folder)
        return why

    def link(self, path: str) -> str | None:
        target = self.seen.links[path] = super().link(path)
        return target

    def exists(self, path: str) -> bool:
        found = super().exists(path)
        if found:
            self.seen.listed.add(path)
        return found

    def may_open(self, path: str) -> bool:
        allowed = super().may_open(path)
        if not allowed and super().exists(path):
            self.seen.denied.add(path)
        return allowed

    def version_of(self, package: str) -> str | None:
        version = super().version_of(package)
        if version is not None:
            self.seen.packages[package] = version
        return version

    def write(self, folder: Path) -> None:
        """Write the record to ``folder``: a tree of files, and the rest as ``machine.json``.

        Ids of devices, serial numbers and the home folder are replaced. Variables lose the name of
        the host, too. A failed write leaves nothing behind.

        Raises:
            InputError: the folder is not empty, or cannot be written.
        """
        try:
            self._write_or_clear(folder)
        except InputError:
            raise
        except (OSError, ValueError) as error:
            raise InputError(f"the recording cannot be written to {folder}: {error}") from error

    def _write_or_clear(self, folder: Path) -> None:
        """Write the record. Remove all files and folders of the record if that fails."""
        if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
            raise InputError(
                f"{folder} exists and is not empty: give a new folder for the recording"
            )
        places = (folder, *folder.parents)
        made = [place for place in places if not os.path.lexists(place)]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                self._write_tree(folder)
            except BaseException:
                _empty(folder)
                raise
        except BaseException:
            for place in made:
                with suppress(OSError):
                    place.rmdir()
            raise

    def _write_tree(self, folder: Path) -> None:
        scrubber = Scrubber()
        seen = self.seen
        for path, text in seen.files.items():
            if text is not None:
                _place(folder, path).write_text(scrubber.file(path, text), encoding="utf-8")
        for path, target in seen.links.items():
            if target is None:
                continue
            free = _free_place(folder, path)
            # A folder stands in the place of the link if something below the link was read.
            if free:
                # "" is the last part of a target such as "x/".
                free.symlink_to(target or "./")
        for path in sorted(seen.folders):
            free = _free_place(folder, path)
            if free:
                free.mkdir()
        # A path that was only listed becomes an empty file. The last path comes first, so that the
        # content of a folder makes the folder.
        for path in sorted(seen.listed, reverse=True):
            free = _free_place(folder, path)
            if free:
                free.touch()
        # After the files: a variable may name a device by the first digits of an id in a file.
        data = self._data(scrubber)
        _place(folder, RECORD).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")

    def _data(self, scrubber: Scrubber) -> dict[str, object]:
        """Return everything beside the files as plain data."""
        environ = self.seen.variables
        names = sorted(environ.seen & environ.variables.keys())
        return {
            "environ": {name: scrubber.value(environ.variables[name]) for name in names},
            "packages": self.seen.packages,
            "torch": torch_data(self.torch_build()),
            "denied": sorted(self.seen.denied),
        }


def _empty(folder: Path) -> None:
    """Remove the content of a folder, and keep the folder."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


def _free_place(folder: Path, path: str) -> Path | None:
    """Return the place of a path of the machine, or ``None`` if the place is taken."""
    place = _place(folder, path)
    return None if os.path.lexists(place) else place


def _place(folder: Path, path: str) -> Path:
    """Return the place of a path of the machine in the recording, and make the folder around it.

    Raises:
        ValueError: a recorded link leads out of the recording.
    """
    place = folder / path.lstrip("/")
    inside = os.path.realpath(folder)
    parent = os.path.realpath(place.parent)
    if os.path.commonpath((inside, parent)) != inside:
        raise ValueError(f"{path} leads out of it")
    place.parent.mkdir(parents=True, exist_ok=True)
    return place
