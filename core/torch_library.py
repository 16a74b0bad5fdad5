"""Register a plugin's functions as torch ops, under the name by which vLLM's plugins do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from opgraft.errors import ConflictError
from opgraft.registry.declarations import redefines
from torch.library import Library, infer_schema, register_fake

NAMESPACE = "opgraft"

_registered: dict[str, tuple[Callable[..., Any], Any]] = {}
"""By qualified name, the function and the library that holds it; torch takes an op back with its library."""


def direct_register_custom_op(
    op_name: str,
    op_func: Callable[..., Any],
    mutates_args: Sequence[str] | None = None,
    fake_impl: Callable[..., Any] | None = None,
    target_lib: Library | None = None,
    dispatch_key: str | None = None,
    tags: Sequence[torch.Tag] = (),
) -> None:
    """Make a function ``torch.ops.opgraft.<op_name>``, which compilers show as one node.

    It costs less per call than ``torch.library.custom_op`` and has no backward. The same function again is a no-op, and
    a reloaded definition of it takes its place.

    Args:
        op_name: a name that no functional form and no other plugin has; one with the plugin's own prefix is safe.
        op_func: the function; its annotations make the schema.
        mutates_args: the arguments that it writes to.
        fake_impl: computes shapes, dtypes and devices of the results from those of the arguments, for compilers.
        target_lib: registers the op in that library, and under its namespace, instead.
        dispatch_key: torch's key, such as ``PrivateUse1``; every device if not given.
        tags: torch's tags for the op.

    Raises:
        ConflictError: the name is taken.
        ValueError: the annotations make no schema; raised by torch.
    """
    namespace = NAMESPACE if target_lib is None else target_lib.ns
    qualname = f"{namespace}::{op_name}"
    known = _registered[qualname][0] if qualname in _registered else None
    if known is op_func:
        return
    if known is not None and redefines(known, op_func):
        del _registered[qualname]
    if hasattr(getattr(torch.ops, namespace), op_name):
        raise ConflictError(
            f"torch.ops.{namespace}.{op_name} is registered already, so {op_func.__module__}.{op_func.__qualname__} "
            "cannot be: choose another op_name, or a target_lib with a namespace of the plugin's own"
        )
    library: Any = target_lib or Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]  # torch leaves it so
    library.define(
        op_name + infer_schema(op_func, mutates_args=tuple(mutates_args or ())), tags=tuple(tags)
    )
    library.impl(op_name, op_func, dispatch_key or "CompositeExplicitAutograd")
    if fake_impl is not None:
        register_fake(qualname, fake_impl, lib=library)
    _registered[qualname] = (op_func, library)
