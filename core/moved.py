"""Modules that were documented under another name: importing one warns and gives the module that took its place."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType

MOVED: Mapping[str, str] = MappingProxyType(
    {
        "opgraft.definitions.form": "opgraft.binding.functional",
        "opgraft.kernels.weight_cache": "opgraft.ops.linear.weight_cache",
        "opgraft.ops.linear.pack": "opgraft.ops.pack",
        "opgraft.specs.catalogue": "opgraft.testing.catalogue",
        "opgraft.specs.checks": "opgraft.testing.checks",
        "opgraft.specs.proof": "opgraft.testing.proof",
        "opgraft.specs.spec": "opgraft.ops.spec",
    }
)
"""Former name → present name. They go with the next minor version."""


_PACKAGES = frozenset(name.rpartition(".")[0] for name in MOVED)


class MovedModules:
    """Finds the modules of ``MOVED`` under their former names, and loads them.

    It derives from no class of ``importlib.abc``, which takes milliseconds of each start to import.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in MOVED or fullname in _PACKAGES:
            return ModuleSpec(fullname, self, is_package=fullname in _PACKAGES)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        former = module.__name__
        if former in _PACKAGES:  # empty: with a path it would find its modules a second time
            return
        warnings.warn(
            f"{former} is now {MOVED[former]}: import that; the former name goes with the next minor version",
            DeprecationWarning,
            stacklevel=2,
        )
        sys.modules[former] = importlib.import_module(MOVED[former])


def install() -> None:
    """Let imports find moved modules. A second time it does nothing."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())
