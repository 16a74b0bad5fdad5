"""The hooks of a plugin: a module or an object with functions marked ``@opgraft.hookimpl``.

Hooks are called once per activation, in pluggy's order (``tryfirst``, ``trylast``), after the
platform was decided. If the distribution offers no platform, an attribute of the plugin names the
platforms for its kernels: ``platforms = ("cpu",)``, or ``platforms = "any"``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pluggy
from opgraft.config import OpgraftConfig
from opgraft.errors import close_matches, near_matches
from opgraft.platform import Platform

if TYPE_CHECKING:
    from opgraft.registry.adapter import Adapter, CallAdapter

PROJECT = "opgraft"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def opgraft_veto(platform: Platform) -> str | None:
    """Return a reason against this plugin, such as an old driver, or ``None``. Called first."""


@hookspec
def opgraft_config(platform: Platform) -> OpgraftConfig | None:
    """Return changed defaults. Environment and settings stand above them."""


@hookspec
def opgraft_register_ops(platform: Platform) -> None:
    """Register ops and replacements, typically by importing their modules."""


@hookspec
# A specification has no body.
def opgraft_graft_adapters() -> Iterable[Adapter | CallAdapter]:  # type: ignore[empty-body]
    """Return rows for the tables of ``opgraft.graft``. Built-in rows come after those of plugins.

    An ``Adapter`` recognises modules that become an op. A ``CallAdapter`` recognises calls of
    functions in the forward of a module that stays. If children of a module become ops,
    ``Adapter.recognise`` sees a copy of the module with these ops. An exception of ``recognise``
    leaves the module or the call alone, and the report shows the exception.
    """


RESULT_TYPES: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        "opgraft_veto": (str, type(None)),
        "opgraft_config": (OpgraftConfig, type(None)),
        "opgraft_register_ops": (type(None),),
        "opgraft_graft_adapters": (Iterable,),
    }
)
"""The types of results of each hook. A wrong type would fail later, far from the plugin."""

_HOOK_CUTOFF = 0.8
"""A function whose name is more alike has the misspelt name of a hook."""


def unmarked(plugin: object) -> Iterator[tuple[str, Callable[..., Any], str]]:
    """Yield unmarked functions with the name of a hook, or nearly: name, function and advice."""
    for name in dir(plugin):
        function = getattr(plugin, name, None)
        named = name.startswith(f"{PROJECT}_") or near_matches(name, RESULT_TYPES, _HOOK_CUTOFF)
        if named and callable(function) and not hasattr(function, f"{PROJECT}_impl"):
            hint = "" if name in RESULT_TYPES else f" {close_matches(name, RESULT_TYPES)}"
            yield name, function, f"mark it with @opgraft.hookimpl.{hint}"
