"""Kernels that somebody provides for forms: each is one operator, counts its calls, and computes the definition."""

from __future__ import annotations

import functools
from typing import Any

from opgraft import functional

CALLS: list[str] = []


@functools.cache
def kernel_of(name: str) -> Any:
    """The kernel for a form."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        CALLS.append(name)
        return getattr(functional, name).native(*args, **kwargs)

    kernel.__qualname__ = f"kernel_of_{name}"
    return kernel


def provide(op: Any, *names: str, **attributes: Any) -> None:
    """Provide kernels of an op for the named forms, by a class with these attributes."""
    functions = {name: kernel_of(name) for name in names}
    op.register_oot(type(f"Own{op.__name__}", (op,), {"functional_oot": functions, **attributes}))
