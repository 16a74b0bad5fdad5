"""Keep registered ops that write to their arguments from dropping gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library

_below_autograd: Any = getattr(torch._C, "_AutoDispatchBelowAutograd", None)
"""The guard around the rest of a kernel for autograd, as in torch's notes on custom ops."""

_libraries: dict[str, Library] = {}
"""Op → library of its kernel. Torch drops a kernel with its library."""


def remove_operators(library: Any) -> None:
    """Remove the operators of a library, which must not be used again."""
    # With the library itself, torch 2.8 leaves a called operator as an attribute of torch.ops.
    library._destroy()


def on_gradients(op: str, refuse: Callable[[str], object]) -> None:
    """Have a registered op call ``refuse`` before the op would drop a gradient.

    Torch takes no backward for an op that writes to arguments. Its own kernel for autograd drops
    the gradient without an error. This kernel takes that place.

    Args:
        op: ``namespace::name``.
        refuse: raises. It takes the name of the argument that requires a gradient.
    """
    _libraries.pop(op, None)
    # Another torch: the op drops gradients without an error.
    if _below_autograd is None:
        return
    namespace, _, name = op.partition("::")
    overload = getattr(getattr(torch.ops, namespace), name).default
    names = [argument.name for argument in overload._schema.arguments]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            given = (*zip(names, args, strict=False), *kwargs.items())
            for argument, value in given:
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    refuse(argument)
        with _below_autograd():
            return overload(*args, **kwargs)

    # Torch has no annotations here.
    library: Any = Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
    _libraries[op] = library
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        library.impl(name, kernel, "Autograd", allow_override=True)
