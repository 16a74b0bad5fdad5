"""Devices that are written in Python, in the place that torch keeps for a backend from outside, ``PrivateUse1``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import backend_registration

_set_up: Any = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
"""Gives the backend in Python what torch asks of it, a guard and hooks; older versions take them in C++ only."""

_no_functions: Any = getattr(torch._C, "_disabled_torch_function_impl", None)

_wrap: Any = getattr(torch.Tensor, "_make_wrapper_subclass", None)

_kept: list[torch.library.Library] = []
"""Holds the fallback in place; torch takes it back with the library that brought it."""


def why_not() -> str:
    """Say why there can be no such device in this process, "" where there can be, or is one already."""
    if _set_up is None or _no_functions is None or _wrap is None:
        return (
            f"torch {torch.__version__} takes the guard of a device in C++ only: take a later one"
        )
    taken = torch._C._get_privateuse1_backend_name()
    if not _kept and taken != "privateuseone":
        return f"another backend, {taken}, has the only place that torch keeps for one from outside"
    return ""


def register_device(name: str, compute: Callable[..., Any]) -> None:
    """Make a device type known to torch, once per process.

    Args:
        name: of the type.
        compute: runs every operator on the device: it takes the operator and its arguments.
    """
    if _kept:
        return
    _set_up(name)
    library: Any = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]  # torch leaves it so
    library.fallback(compute, "PrivateUse1")
    _kept.append(library)


def without_functions(cls: Any) -> Any:
    """Have torch's functions take tensors of a class as they take its own: only operators are the class's business."""
    cls.__torch_function__ = _no_functions
    return cls


def wrapper_of(cls: Any, values: torch.Tensor, device: torch.device) -> Any:
    """Return a tensor of a class on a device, without numbers, of the shape, strides and dtype of ``values``."""
    return _wrap(
        cls,
        values.shape,
        strides=values.stride(),
        storage_offset=values.storage_offset(),
        dtype=values.dtype,
        device=device,
    )
