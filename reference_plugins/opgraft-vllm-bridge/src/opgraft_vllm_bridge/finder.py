"""The finder that answers imports of ``vllm`` where vLLM is not installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from opgraft_vllm_bridge.names import MODULES, NAMES, PACKAGES

_ORIGIN = "opgraft-vllm-bridge"


class VllmFinder(MetaPathFinder, Loader):
    """Makes the modules of vLLM that there are counterparts of. Each plugin has its own, and they are all alike.

    Attributes:
        plugin: the name of the plugin's entry point.
    """

    def __init__(self, plugin: str) -> None:
        self.plugin = plugin

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VllmFinder) and other.plugin == self.plugin

    def __hash__(self) -> int:
        return hash(self.plugin)

    def __repr__(self) -> str:
        return f"VllmFinder({self.plugin!r})"

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MODULES or is_installed():
            return None
        return ModuleSpec(fullname, self, origin=_ORIGIN, is_package=fullname in PACKAGES)

    def exec_module(self, module: ModuleType) -> None:
        for name, home in NAMES.get(module.__name__, {}).items():
            setattr(module, name, getattr(importlib.import_module(home), name))

    def install(self) -> None:
        """Answer imports from now on, after all other finders; once for each plugin."""
        if self not in sys.meta_path:
            sys.meta_path.append(self)


def is_installed() -> bool:
    """Tell whether vLLM itself is there, to which plugins belong then."""
    return PathFinder.find_spec("vllm") is not None
