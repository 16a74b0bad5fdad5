"""Writing down what probes look at, as a folder that stands for the machine in a bug report or a test."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from opgraft.errors import InputError
from opgraft.machine.machine import RECORD, Machine, without_secrets
from opgraft.machine.scrubbing import Scrubber


@dataclass
class _SeenVariables(Mapping[str, str]):
    """The environment, noting which variables were asked for."""

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
    """A record of what probes have asked for.

    Attributes:
        variables: the environment, which notes the names that were looked up.
        files: path → text, ``None`` where it could not be read.
        listed: paths that are known to exist.
        folders: those that could be listed.
        links: path → last part of the link's target, ``None`` where there is no link.
        denied: paths that exist and may not be opened.
        packages: distribution → version of those that are installed.
    """

    variables: _SeenVariables
    files: dict[str, str | None] = field(default_factory=dict)
    listed: set[str] = field(default_factory=set)
    folders: set[str] = field(default_factory=set)
    links: dict[str, str | None] = field(default_factory=dict)
    denied: set[str] = field(default_factory=set)
    packages: dict[str, str] = field(default_factory=dict)


class RecordingMachine(Machine):
    """A machine that notes what probes read, so that exactly this can be written down."""

    seen: SeenRequests

    def __init__(self, machine: Machine) -> None:
        environ = _SeenVariables(machine.environ)
        super().__init__(machine.root, environ, machine.packages, machine.torch, machine.denied)
        # A machine is frozen; what was seen of it grows.
        object.__setattr__(self, "seen", SeenRequests(environ))

    def variables(self) -> dict[str, str]:
        # Told to a child process, which is not recorded.
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
        """Write what was read to ``folder``: the tree, and ``machine.json`` with variables, packages and denied paths.

        Ids of devices, serial numbers and the home folder are replaced, in variables the host's name too.

        Raises:
            InputError: the folder exists and is not empty, or cannot be written.
        """
        made: list[Path] = []
        try:
            if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
                raise InputError(
                    f"{folder} exists and is not empty: give a new folder for the recording"
                )
            made += [place for place in (folder, *folder.parents) if not os.path.lexists(place)]
            folder.mkdir(parents=True, exist_ok=True)
            try:
                self._write_tree(folder)
            except BaseException:
                _empty(folder)
                raise
        except BaseException as error:
            for place in made:
                with suppress(OSError):
                    place.rmdir()
            if isinstance(error, (OSError, ValueError)) and not isinstance(error, InputError):
                raise InputError(f"the recording cannot be written to {folder}: {error}") from error
            raise

    def _write_tree(self, folder: Path) -> None:
        scrubber = Scrubber()
        seen = self.seen
        for path, text in seen.files.items():
            if text is not None:
                _place(folder, path).write_text(scrubber.file(path, text), encoding="utf-8")
        for path, target in seen.links.items():
            # A folder stands in the place of the link if something below the link was read.
            if target is not None and (free := _free_place(folder, path)):
                # "" is the last part of a target such as "x/".
                free.symlink_to(target or "./")
        for path in sorted(seen.folders):
            if free := _free_place(folder, path):
                free.mkdir()
        # A path that was only listed becomes an empty file. A folder sorts before its contents, and so comes after.
        for path in sorted(seen.listed, reverse=True):
            if free := _free_place(folder, path):
                free.touch()
        # After the files: a variable may name a device by the first digits of an id in a file.
        data = self._data(scrubber)
        _place(folder, RECORD).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")

    def _data(self, scrubber: Scrubber) -> dict[str, object]:
        """Return the record of everything that is no file."""
        environ = self.seen.variables
        names = sorted(environ.seen & environ.variables.keys())
        build = self.torch_build()
        torch = {"version": build.version, "backends": dict(build.backends)} if build else None
        return {
            "environ": {name: scrubber.value(environ.variables[name]) for name in names},
            "packages": self.seen.packages,
            "torch": torch,
            "denied": sorted(self.seen.denied),
        }


def _empty(folder: Path) -> None:
    """Remove what lies in a folder, and leave the folder."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


def _free_place(folder: Path, path: str) -> Path | None:
    """Return the place of a path of the machine; ``None`` if something is there already."""
    place = _place(folder, path)
    return None if os.path.lexists(place) else place


def _place(folder: Path, path: str) -> Path:
    """Return the place at which a path of the machine is written, in a folder that is made for it.

    Raises:
        ValueError: a link that was recorded leads there, and out of the recording.
    """
    place, inside = folder / path.lstrip("/"), os.path.realpath(folder)
    if os.path.commonpath((inside, os.path.realpath(place.parent))) != inside:
        raise ValueError(f"{path} leads out of it")
    place.parent.mkdir(parents=True, exist_ok=True)
    return place
