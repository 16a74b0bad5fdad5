"""Kernels in Triton for op classes. The import of an op class works without Triton."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from opgraft.binding.derivation import FunctionalKernels

_BY_MODULE: dict[str, FunctionalKernels] = {}


def on_triton(module: str) -> FunctionalKernels:
    """Return the kernels of a module in Triton, for the GPUs of several vendors.

    No kernel has a backward: for a gradient, the native definition runs. Without Triton, the
    kernels are not chosen, and the decision says so.

    Args:
        module: the dotted name of the module. The names in ``__all__`` are those of functional
            forms.
    """
    kernels = FunctionalKernels(module, needs=triton_missing, inference_only=True)
    return _BY_MODULE.setdefault(module, kernels)


def triton_kernels() -> dict[str, Callable[..., Any]]:
    """Return all kernels in Triton, by the name of the functional form.

    Raises:
        MissingKernelError: Triton is not installed.
    """
    found: dict[str, Callable[..., Any]] = {}
    for kernels in _BY_MODULE.values():
        found.update(kernels)
    return found


def triton_missing() -> str | None:
    """Return the reason for ``opgraft.needs`` if Triton kernels cannot run here, or ``None``."""
    if importlib.util.find_spec("triton") is None:
        return "needs Triton, which is not installed: pip install triton"
    try:
        for module in _BY_MODULE:
            importlib.import_module(module)
    except ImportError as error:
        return f"needs Triton, whose import failed: {error}"
    return None
