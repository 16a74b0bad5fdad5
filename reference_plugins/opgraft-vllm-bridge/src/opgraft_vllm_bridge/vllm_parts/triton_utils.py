"""Triton, or a stand-in without kernels: ``vllm.triton_utils``."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any


def _usable() -> bool:
    """Return True if Triton is installed and has a driver of this machine's devices."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        drivers = importlib.import_module("triton.backends").backends.values()
        return any(each.driver and each.driver.is_active() for each in drivers)
    except Exception:  # code of another package may raise anything
        return False


class _Undecorated:
    """Stands for Triton if Triton cannot be used. Decorated functions cannot be launched."""

    @staticmethod
    def jit(*functions: Any, **options: Any) -> Any:
        return functions[0] if functions else lambda function: function

    @staticmethod
    def autotune(*settings: Any, **options: Any) -> Any:
        return lambda function: function

    heuristics = autotune

    @staticmethod
    def Config(*settings: Any, **options: Any) -> None:  # noqa: N802  # Triton's name
        """Return None: only ``autotune`` reads the result."""

    @staticmethod
    def cdiv(x: int, y: int) -> int:
        return -(x // -y)


class _Language:
    """The names of ``triton.language`` in annotations."""

    constexpr = dtype = tensor = int32 = int64 = float32 = None


HAS_TRITON = _usable()
triton: Any = importlib.import_module("triton") if HAS_TRITON else _Undecorated
tl: Any = importlib.import_module("triton.language") if HAS_TRITON else _Language
