"""Parts for bridges to other plugin hosts, such as ``opgraft_vllm_bridge``. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from opgraft.base.files import read_regular
from opgraft.base.text import described, shortened
from opgraft.config import OpgraftConfig
from opgraft.errors import PlatformError
from opgraft.platform import Platform, PlatformSpec
from opgraft.plugins.discovery import PLATFORM_GROUP, Discovery, Offer, discover
from opgraft.plugins.metadata import specs_of
from opgraft.registry.state import host_state

__all__ = [
    "Discovery",
    "Offer",
    "Ported",
    "Uncovered",
    "built_in_platform",
    "current_config",
    "described",
    "discover",
    "log_level",
    "read_regular",
    "shortened",
    "specs_of",
]


@dataclass(frozen=True)
class Uncovered:
    """A use of a name without a counterpart in opgraft.

    Attributes:
        file: a path below the plugin's folder.
        line: of the original file.
        name: in the other host.
        hint: the next step; empty if none is known.
    """

    file: str
    line: int
    name: str
    hint: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}"
        if not self.hint:
            return f"{place}: {self.name}"
        return f"{place}: {self.name}: {self.hint}"


@dataclass
class Ported:
    """A plugin of another host, rewritten for opgraft.

    Attributes:
        name: of the plugin.
        guide: the file with the remaining work.
        files: contents by path.
        uncovered: uses without a counterpart.
    """

    name: str
    guide: str
    files: dict[str, bytes] = field(default_factory=dict)
    uncovered: list[Uncovered] = field(default_factory=list)


def built_in_platform(name: str) -> Platform:
    """Return a platform of opgraft, such as ``cpu``. It need not be the chosen one.

    Raises:
        PlatformError: opgraft has no platform of this name.
    """
    known = []
    for offer in discover().of_group(PLATFORM_GROUP):
        if not offer.built_in:
            continue
        known.append(offer.name)
        if offer.name == name:
            spec: PlatformSpec = offer.load()
            return spec.load_class()()
    names = ", ".join(known)
    raise PlatformError(f"opgraft has no platform {name!r}: choose one of {names}")


def current_config() -> OpgraftConfig:
    """Return the current settings. Every setting has a value."""
    return host_state().settings().config


def log_level() -> str:
    """Return the level of opgraft's log in capitals, such as ``INFO``."""
    environment = host_state().known_environment()
    level = environment.log or "info"
    return level.upper()
