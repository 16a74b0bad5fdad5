"""Writing down what probes look at, as a folder that stands for the machine in a bug report or a test."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from opgraft.errors import InputError
from opgraft.machine import RECORD, Machine

_UUID = re.compile(r"\b[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")
_REST = "-0000-0000-0000-000000000000"
_SERIAL = re.compile(r"(?im)^([^\S\n]*[\w ]*(?:serial|unique_id)[\w ]*[:=]?[^\S\n]+)\S+")


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


class RecordingMachine(Machine):
    """A machine that notes what probes read, so that exactly this can be written down."""

    def __init__(self, machine: Machine) -> None:
        environ = _SeenVariables(machine.environ)
        super().__init__(machine.root, environ, machine.packages, machine.torch, machine.denied)
        self.memo.update(variables=environ, files={}, folders=set(), links={}, denied=set(), packages={})

    def read(self, path: str) -> str | None:
        text = super().read(path)
        self.memo["files"][path] = text
        return text

    def names(self, folder: str) -> list[str]:
        names = super().names(folder)
        self.memo["folders"].update(f"{folder}/{name}" for name in names)
        return names

    def link(self, path: str) -> str | None:
        target = super().link(path)
        self.memo["links"][path] = target
        return target

    def exists(self, path: str) -> bool:
        found = super().exists(path)
        if found:
            self.memo["folders"].add(path)
        return found

    def may_open(self, path: str) -> bool:
        allowed = super().may_open(path)
        if not allowed and super().exists(path):
            self.memo["denied"].add(path)
        return allowed

    def version_of(self, package: str) -> str | None:
        version = super().version_of(package)
        if version is not None:
            self.memo["packages"][package] = version
        return version

    def write(self, folder: Path) -> None:
        """Write what was read to ``folder``: the tree, and ``machine.json`` with variables, packages and denied paths.

        UUIDs, serial numbers, the host's name and the home folder are replaced.

        Raises:
            InputError: the folder exists and is not empty, or cannot be written.
        """
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InputError(f"{folder} exists and is not empty: give a new folder for the recording")
        try:
            self._write_tree(folder)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise InputError(f"the recording cannot be written to {folder}: {error}") from error

    def _write_tree(self, folder: Path) -> None:
        build = self.torch_build()
        seen = self.memo["variables"]
        uuids: dict[str, str] = {}
        data = {
            "environ": {
                name: scrub(seen.variables[name], uuids) for name in sorted(seen.seen) if name in seen.variables
            },
            "packages": self.memo["packages"],
            "torch": {"version": build.version, "backends": dict(build.backends)} if build else None,
            "denied": sorted(self.memo["denied"]),
        }
        files = {path: text for path, text in self.memo["files"].items() if text is not None}
        links = {path: target for path, target in self.memo["links"].items() if target is not None}
        for path, text in files.items():
            _place(folder, path).write_text(scrub(text, uuids), encoding="utf-8")
        for path, target in links.items():
            _place(folder, path).symlink_to(target)
        # What was only listed becomes an empty file; backwards, so that a folder comes after what lies in it.
        for path in sorted(self.memo["folders"], reverse=True):
            if not os.path.lexists(_place(folder, path)):
                _place(folder, path).touch()
        _place(folder, RECORD).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def scrub(text: str, uuids: dict[str, str]) -> str:
    """Replace what identifies one machine or its user: UUIDs, serial numbers, host name, home folder.

    ``uuids`` keeps what stands for which UUID: a variable that names a device must go on naming it.
    """
    text = _UUID.sub(lambda match: uuids.setdefault(match[0].lower(), f"{len(uuids):08x}{_REST}"), text)
    text = _SERIAL.sub(r"\g<1>0", text)
    text = text.replace(str(Path.home()), "~") if Path.home() != Path("/") else text
    host = socket.gethostname()
    return re.sub(rf"\b{re.escape(host)}\b", "host", text) if len(host) > 2 else text


def _place(folder: Path, path: str) -> Path:
    place = folder / path.lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    return place
