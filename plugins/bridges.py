"""Parts for bridges to other plugin hosts, such as ``opgraft_vllm_bridge``. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from opgraft.base.files import read_regular
from opgraft.base.text import described, printable, shortened
from opgraft.config import OpgraftConfig
from opgraft.errors import PlatformError
from opgraft.platform import Platform, PlatformSpec
from opgraft.plugins.discovery import PLATFORM_GROUP, Discovery, Offer, discover
from opgraft.plugins.metadata import specs_of
from opgraft.plugins.platform_class import report
from opgraft.registry.decision import Provider
from opgraft.registry.finding import Finding
from opgraft.registry.state import host_state

__all__ = [
    "Discovery",
    "Offer",
    "Ported",
    "Uncovered",
    "built_in_platform",
    "classes_replaced_by",
    "current_config",
    "described",
    "discover",
    "log_level",
    "origin_of",
    "printable",
    "read_regular",
    "report_fault",
    "report_file",
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


def origin_of(name: str) -> str:
    """Return the layer that sets a setting, such as ``command line``; ``default`` without one."""
    return host_state().settings().origins[name]


def classes_replaced_by(provider: Provider) -> list[str]:
    """Return the names of the classes that active replacements of a distribution replace."""
    return [
        replacement.asked_for
        for replacement in host_state().active
        if replacement.provider == provider
    ]


def report_fault(message: str, provider: Provider, location: str | None = None) -> None:
    """Log a fault of a plugin once, and let ``opgraft plugins doctor`` list it.

    Args:
        message: the fault, with the name of the plugin.
        provider: the distribution.
        location: ``file:line`` of the fault.
    """
    report(Finding(message, provider, location))


def report_file() -> Path | None:
    """Return the file for the kernels that run in another host, ``OPGRAFT_REPORT``, or ``None``."""
    path = host_state().known_environment().report
    return None if path is None else Path(path)


def log_level() -> str:
    """Return the level of opgraft's log in capitals, such as ``INFO``."""
    environment = host_state().known_environment()
    level = environment.log or "info"
    return level.upper()
