"""Kernels in Triton for op classes. The import of an op class works without Triton."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from opgraft.binding.derivation import FunctionalKernels

_BY_MODULES: dict[tuple[str, ...], FunctionalKernels] = {}


def on_triton(*modules: str) -> FunctionalKernels:
    """Return the kernels of modules in Triton, for the GPUs of several vendors.

    No kernel has a backward: for a gradient, the native definition runs. Without Triton, the
    kernels are not chosen, and the decision says so.

    Args:
        *modules: the dotted names of the modules. The names in ``__all__`` are those of functional
            forms.
    """
    kernels = FunctionalKernels(modules, needs=triton_missing, inference_only=True)
    return _BY_MODULES.setdefault(modules, kernels)


def triton_kernels() -> dict[str, Callable[..., Any]]:
    """Return all kernels in Triton, by the name of the functional form.

    Raises:
        MissingKernelError: Triton is not installed.
    """
    found: dict[str, Callable[..., Any]] = {}
    for kernels in _BY_MODULES.values():
        found.update(kernels)
    return found


def triton_missing() -> str | None:
    """Return the reason for ``opgraft.needs`` if Triton kernels cannot run here, or ``None``."""
    if importlib.util.find_spec("triton") is None:
        return "needs Triton, which is not installed: pip install triton"

    try:
        for modules in _BY_MODULES:
            for module in modules:
                importlib.import_module(module)
    except ImportError as error:
        return f"needs Triton, whose import failed: {error}"
    return None
