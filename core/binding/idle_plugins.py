"""Active plugins that bring kernels, none of which can run in this process."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from opgraft.binding.kernels import Kernel, declared_kernels
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.platform import DISPATCH_KEYS, Platform, effective_chain
from opgraft.plugins.selection import selected_platform
from opgraft.registry.choice import objection_to
from opgraft.registry.decision import Provider
from opgraft.registry.declarations import Replacement
from opgraft.registry.state import host_state

_SHOWN = 3
_FORWARD = "forward"
_DESCRIBING = ("extra_repr", "_get_name")
"""Methods that change only how a module is printed."""


@dataclass(frozen=True)
class IdlePlugin:
    """An active plugin that has no kernel for this process.

    Attributes:
        name: the entry point of the plugin.
        provider: its distribution.
        replacements: the plugin's replacements of ops with kernels.
        reasons: the objections to the kernels, each with the names of its kernels.
    """

    name: str
    provider: Provider
    replacements: tuple[Replacement, ...]
    reasons: tuple[tuple[str, tuple[str, ...]], ...]

    def __str__(self) -> str:
        lines = [f"{listed(names)}: {reason}" for reason, names in self.reasons]
        plugin = f"plugin {self.name} ({self.provider})"
        return f"{plugin} has no kernel that can run here: {'; '.join(lines)}"


def idle_plugins() -> list[IdlePlugin]:
    """List the active plugins whose kernels all lack something, are for other devices, or have false conditions.

    A plugin without a kernel of its own, such as one with a scheduler, is not listed.
    """
    by_plugin: dict[str, list[Replacement]] = {}
    for replacement in host_state().active:
        plugin = replacement.plugin
        if plugin and _own_kernels(replacement):
            by_plugin.setdefault(plugin, []).append(replacement)

    found = []
    for name, replacements in by_plugin.items():
        idle = _idle(name, replacements)
        if idle is not None:
            found.append(idle)
    return found


def _idle(name: str, replacements: Sequence[Replacement]) -> IdlePlugin | None:
    """Describe the plugin, or return ``None`` if one of its kernels can run."""
    kernels: dict[str, list[str]] = {}
    for replacement in replacements:
        for kernel, reason in _against(replacement):
            if reason is None:
                return None
            kernels.setdefault(reason, []).append(str(kernel))

    provider = replacements[0].provider
    reasons = tuple((reason, tuple(names)) for reason, names in kernels.items())
    return IdlePlugin(name, provider, tuple(replacements), reasons)


def _against(replacement: Replacement) -> Iterator[tuple[Kernel, str | None]]:
    """Yield each kernel of a replacement with the objection to it here, if there is one."""
    platform = selected_platform().platform
    objection = objection_to(replacement, platform, wanted=None)
    for kernel in _own_kernels(replacement):
        yield kernel, objection or _of_other_device(kernel, platform) or kernel.missing()


def _of_other_device(kernel: Kernel, platform: Platform) -> str | None:
    """Return the reason why no op on this platform runs a kernel for its dispatch key, or ``None``."""
    chain = effective_chain(platform)
    if kernel.method == _FORWARD or kernel.key in chain:
        return None
    return f"{kernel.key!r} is not in the dispatch chain of {platform.name}, {' > '.join(chain)}"


def _own_kernels(replacement: Replacement) -> list[Kernel]:
    """List the kernels, for any device, that a replacement of an op adds to those of its target."""
    target = replacement.target
    if target is None or issubclass(target, PluggableClass):
        return []
    declared = declared_kernels(replacement.cls, DISPATCH_KEYS)
    inherited = target.__mro__
    own = [kernel for kernel in declared if kernel.owner not in inherited]
    return [] if _overrides_more(replacement.cls, target) else own


def _overrides_more(cls: type, target: type) -> bool:
    """Return True if a class overrides methods of its target that are no kernels, and that run on any device."""
    for base in cls.__mro__:
        if base in target.__mro__:
            return False
        for name, value in vars(base).items():
            if name in _DESCRIBING:
                continue
            is_method = inspect.isfunction(value) and not name.startswith((_FORWARD, "__"))
            if is_method and hasattr(target, name):
                return True
    return False


def listed(names: Sequence[str]) -> str:
    """Name the first few, and say how many follow."""
    more = len(names) - _SHOWN
    if more <= 1:  # naming the last one is as short
        return ", ".join(names)
    return f"{', '.join(names[:_SHOWN])} and {more} others"
