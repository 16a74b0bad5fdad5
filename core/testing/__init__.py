"""The proof of ops, the inventory of ops in a process, and the conformance kit for plugins.

Tests of a plugin derive from ``opgraft.testing.PluginConformance``. The import is late.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opgraft.testing.conformance import again as again
    from opgraft.testing.examples import Example as Example
    from opgraft.testing.isolation import isolated_host as isolated_host
    from opgraft.testing.plugin_conformance import PluginConformance as PluginConformance

_HOME = {
    "Example": "opgraft.testing.examples",
    "PluginConformance": "opgraft.testing.plugin_conformance",
    "again": "opgraft.testing.conformance",
    "isolated_host": "opgraft.testing.isolation",
}

__all__ = [*_HOME]  # strings, spelled once, in _HOME


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'opgraft.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
