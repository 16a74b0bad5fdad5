"""``idle_plugins``: active plugins with kernels, but without one that can run in this process."""

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
"""Methods for printing a module, and for nothing else."""


@dataclass(frozen=True)
class IdlePlugin:
    """An active plugin without a kernel for this process.

    Attributes:
        name: the entry point of the plugin.
        provider: its distribution.
        replacements: the plugin's replacements of ops with kernels.
        reasons: the objections, each with the names of the kernels concerned.
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
    """List the active plugins with kernels, if no kernel of the plugin can run here.

    A kernel may have an unmet need, be for another device, or have a false condition. A plugin
    without kernels, such as one with a scheduler, is not listed.
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
    """Describe the plugin, or return ``None`` if one of the kernels can run."""
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
    """Yield each kernel of a replacement, with the objection or ``None``."""
    platform = selected_platform().platform
    objection = objection_to(replacement, platform, wanted=None)
    for kernel in _own_kernels(replacement):
        against = objection or _against_key(kernel, platform) or kernel.missing()
        yield kernel, against


def _against_key(kernel: Kernel, platform: Platform) -> str | None:
    """Return the objection to a kernel for another device, or ``None``."""
    chain = effective_chain(platform)
    if kernel.method == _FORWARD or kernel.key in chain:
        return None
    keys = " > ".join(chain)
    return f"{kernel.key!r} is not in the dispatch chain of {platform.name}, {keys}"


def _own_kernels(replacement: Replacement) -> list[Kernel]:
    """List the kernels of a replacement for any device, without the target's own kernels.

    The list is empty for a replacement of a class outside of models, and for one that overrides
    other methods too: these run on any device.
    """
    target = replacement.target
    if target is None or issubclass(target, PluggableClass):
        return []
    if _overrides_more(replacement.cls, target):
        return []
    declared = declared_kernels(replacement.cls, DISPATCH_KEYS)
    inherited = target.__mro__
    return [kernel for kernel in declared if kernel.owner not in inherited]


def _overrides_more(cls: type, target: type) -> bool:
    """Return True if a class overrides methods of the target other than kernels."""
    for base in cls.__mro__:
        if base in target.__mro__:
            return False
        for name, value in vars(base).items():
            if name in _DESCRIBING or name.startswith((_FORWARD, "__")):
                continue
            if inspect.isfunction(value) and hasattr(target, name):
                return True
    return False


def listed(names: Sequence[str]) -> str:
    """Return the first few names and the number of the others, such as ``a, b, c and 4 others``."""
    more = len(names) - _SHOWN
    # The last name is as short as its number.
    if more <= 1:
        return ", ".join(names)
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {more} others"
