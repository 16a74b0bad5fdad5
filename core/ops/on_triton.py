"""FunctionalKernels in Triton for op classes, which must be importable where Triton is not installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from opgraft.binding.derivation import FunctionalKernels

_BY_MODULE: dict[str, FunctionalKernels] = {}


def on_triton(module: str) -> FunctionalKernels:
    """Return the kernels in a module of Triton kernels, which serve the GPUs of several vendors.

    None has a backward: where a gradient is required, the native definition runs. Where Triton is not installed they
    are not chosen, and the decision says so.

    Args:
        module: its dotted name. ``__all__`` names the kernels, each as the functional form that it computes.
    """
    return _BY_MODULE.setdefault(
        module, FunctionalKernels(module, needs=triton_missing, inference_only=True)
    )


def triton_kernels() -> dict[str, Callable[..., Any]]:
    """Return all kernels in Triton, by the name of their functional form.

    Raises:
        MissingKernelError: Triton is not installed.
    """
    return {name: kernel for kernels in _BY_MODULE.values() for name, kernel in kernels.items()}


def triton_missing() -> str | None:
    """Say why Triton kernels cannot run in this process, or return ``None``; for ``opgraft.needs``."""
    if importlib.util.find_spec("triton") is None:
        return "needs Triton, which is not installed: pip install triton"
    try:
        for module in _BY_MODULE:
            importlib.import_module(module)
    except ImportError as error:
        return f"needs Triton, whose import failed: {error}"
    return None
