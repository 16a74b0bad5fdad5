"""The finder that answers imports of ``vllm`` if vLLM is not installed."""

from __future__ import annotations

import dis
import importlib
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType
from typing import Any

from opgraft_vllm_bridge.guards import is_guarded
from opgraft_vllm_bridge.missing import (
    PLUGINS,
    Missing,
    MissingAttributeError,
    absence,
    caller,
    place_of,
    plugin_of,
)
from opgraft_vllm_bridge.names import MODULES, NAMES
from opgraft_vllm_bridge.versions import announced_to, numbers_of

_ORIGIN = "opgraft-vllm-bridge"
_VLLM = "vllm"
_VERSION = "__version__"
_NUMBERS = "__version_tuple__"
_IMPORTING = frozenset({dis.opmap["IMPORT_NAME"], dis.opmap["IMPORT_FROM"]})


class VllmModule(ModuleType):
    """A module of vLLM. An import of a name without a counterpart returns a ``Missing`` object."""

    def __getattr__(self, name: str) -> Any:
        qualified = f"{self.__name__}.{name}"
        if name in (_VERSION, _NUMBERS) and name in NAMES.get(self.__name__, {}):
            version = announced_to(plugin_of(caller()))
            return version if name == _VERSION else numbers_of(version)
        if qualified in MODULES:
            return importlib.import_module(qualified)
        frame = caller()
        if name == "__all__" and self.__name__ not in MODULES:
            raise absence(self.__name__, "imports all names of")
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if not _imports(frame):
            raise absence(qualified, "asks for", kind=MissingAttributeError)
        if is_guarded(frame):
            raise AttributeError(f"opgraft has no counterpart of {qualified}")
        return Missing(qualified, place_of(frame))

    def __setattr__(self, name: str, value: Any) -> None:
        # Imports set submodules, and attributes such as __spec__.
        is_part = isinstance(value, ModuleType) or name.startswith("__")
        if not is_part and name not in NAMES.get(self.__name__, {}):
            raise absence(f"{self.__name__}.{name}", "sets", kind=MissingAttributeError)
        super().__setattr__(name, value)


class VllmFinder(MetaPathFinder, Loader):
    """Makes the modules of vLLM. Each plugin has a finder of its own.

    An import statement finds every module of vLLM. Two kinds of imports find only modules with
    counterparts: statements that provide for an ``ImportError``, and calls such as
    ``importlib.import_module``.

    Attributes:
        plugin: the name of the plugin's distribution.
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
        if fullname.partition(".")[0] != _VLLM or is_installed():
            return None
        frame = caller()
        if fullname not in MODULES and (not _imports(frame) or is_guarded(frame)):
            return None
        # Any module may have parts without a counterpart.
        return ModuleSpec(fullname, self, origin=_ORIGIN, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return VllmModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        for name, home in NAMES.get(module.__name__, {}).items():
            if name not in (_VERSION, _NUMBERS):
                setattr(module, name, getattr(importlib.import_module(home), name))

    def install(self, packages: Iterable[str] = ()) -> None:
        """Answer imports from now on, after all other finders. A second call changes nothing.

        Args:
            packages: the top-level packages of the plugin, for messages about it.
        """
        PLUGINS.update(dict.fromkeys(packages, self.plugin))
        if self not in sys.meta_path:
            sys.meta_path.append(self)


def _imports(frame: FrameType) -> bool:
    """Return True if a frame executes an import statement."""
    return frame.f_code.co_code[frame.f_lasti] in _IMPORTING


def is_installed() -> bool:
    """Return True if vLLM itself is installed. Then vLLM runs its plugins."""
    return PathFinder.find_spec("vllm") is not None
