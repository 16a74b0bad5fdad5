"""What a probe may look at, and what it answers.

A probe is a pure function ``probe(machine) -> Evidence``. It imports no torch, creates no device context and never
raises; it looks at the files below ``machine.root`` and at ``machine.environ`` only, so that a folder of fixture files
stands for any machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opgraft.decision import Fact

_LARGEST_FILE = 1 << 20  # bytes; the files of /proc and /sys that probes read are far smaller


@dataclass(frozen=True)
class Machine:
    """A machine as probes see it: a root folder (with /proc, /sys and /dev below it) and an environment."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def read(self, path: str) -> str | None:
        """The text of a file such as ``/proc/cpuinfo``, at most 1 MiB of it, or ``None`` where it cannot be read."""
        try:
            with (self.root / path.lstrip("/")).open("rb") as file:
                return file.read(_LARGEST_FILE).decode("utf-8", errors="replace")
        except OSError:
            return None


@dataclass(frozen=True)
class Device:
    """One device that a probe found. ``memory`` is in bytes, ``None`` where no file tells it."""

    name: str
    capability: str | None = None
    memory: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "capability": self.capability, "memory": self.memory}


@dataclass(frozen=True)
class Evidence:
    """What a probe found: whether the platform can be used, why, and the facts that say so."""

    available: bool
    reason: str
    devices: tuple[Device, ...] = ()
    facts: tuple[Fact, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "available": self.available,
            "reason": self.reason,
            "devices": [device.to_dict() for device in self.devices],
            "facts": [fact.to_dict() for fact in self.facts],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Evidence:
        """The inverse of ``to_dict``, for evidence that a child process printed."""
        return cls(
            available=bool(data["available"]),
            reason=str(data["reason"]),
            devices=tuple(Device(**device) for device in data["devices"]),
            facts=tuple(Fact(**fact) for fact in data["facts"]),
        )
