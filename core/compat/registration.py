"""Registered ops that write to their arguments, and autograd."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library

_below_autograd: Any = getattr(torch._C, "_AutoDispatchBelowAutograd", None)
"""The guard below which a kernel for autograd goes on, as torch's own notes on custom ops do. It has no public name."""

_libraries: dict[str, Library] = {}
"""By op: what holds its kernel in place; torch takes a kernel back with the library that brought it."""


def on_gradients(op: str, refuse: Callable[[str], object]) -> None:
    """Have a registered op, named ``namespace::name``, call ``refuse`` before it would drop a gradient.

    ``refuse`` is told the argument that requires one, by its name in the schema, and raises. For an op that writes to
    its arguments torch takes no backward, and the kernel that it puts in the place of one is silent. This takes that
    place. Without the name that it needs of torch, the op stays silent.
    """
    _libraries.pop(op, None)
    if _below_autograd is None:
        return
    namespace, _, name = op.partition("::")
    overload = getattr(getattr(torch.ops, namespace), name).default
    names = [argument.name for argument in overload._schema.arguments]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            for argument, value in (*zip(names, args, strict=False), *kwargs.items()):
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    refuse(argument)
        with _below_autograd():
            return overload(*args, **kwargs)

    library: Any = Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]  # torch leaves it so
    _libraries[op] = library
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        library.impl(name, kernel, "Autograd", allow_override=True)
