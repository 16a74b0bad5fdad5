"""Register a plugin's functions as torch ops, under the name in vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from opgraft.compat.registration import remove_operators
from opgraft.errors import ConflictError
from opgraft.plugins.discovery import discover
from opgraft.registry.declarations import redefines
from opgraft.registry.state import ACTIVATING, host_state
from torch.library import Library, infer_schema, register_fake

NAMESPACE = "opgraft"

_registered: dict[str, tuple[Callable[..., Any], Any]] = {}
"""Qualified name → function and library. Torch drops an op with its library."""


def direct_register_custom_op(
    op_name: str,
    op_func: Callable[..., Any],
    mutates_args: Sequence[str] | None = None,
    fake_impl: Callable[..., Any] | None = None,
    target_lib: Library | None = None,
    dispatch_key: str | None = None,
    tags: Sequence[torch.Tag] = (),
) -> None:
    """Register a function as ``torch.ops.opgraft.<op_name>``, one node for compilers.

    A call costs less than with ``torch.library.custom_op``. The op has no backward. To register the
    same function again does nothing. A reloaded definition replaces the old one.

    Args:
        op_name: a free name. A name with a prefix of the plugin is safe.
        op_func: the function. The annotations make the schema.
        mutates_args: the arguments that the function writes to.
        fake_impl: computes shapes, dtypes and devices of the results, for compilers.
        target_lib: a library with the namespace for the op. The op does not end with the library.
        dispatch_key: a key of torch, such as ``PrivateUse1``. The default is every device.
        tags: torch's tags for the op.

    Raises:
        ConflictError: the name is taken.
        ValueError: the annotations make no schema.
    """
    namespace = NAMESPACE if target_lib is None else target_lib.ns
    qualname = f"{namespace}::{op_name}"
    known = _registered[qualname][0] if qualname in _registered else None
    # Plugins are activated again after a reset, and their modules stay imported.
    if known is op_func:
        return
    # A notebook runs a cell again.
    if known is not None and redefines(known, op_func):
        remove_operators(_registered.pop(qualname)[1])
    if hasattr(getattr(torch.ops, namespace), op_name):
        owner = f" by {known.__module__}.{known.__qualname__}" if known else ""
        raise ConflictError(
            f"torch.ops.{namespace}.{op_name} is registered already{owner}, so "
            f"{op_func.__module__}.{op_func.__qualname__} cannot be: choose another op_name, or a "
            "target_lib with a namespace of the plugin's own"
        )
    schema = infer_schema(op_func, mutates_args=tuple(mutates_args or ()))

    def register() -> Callable[[], None]:
        # The library of a plugin may hold other ops, which stay if this one is forgotten. Torch has
        # no annotations here.
        library: Any = Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
        library.define(op_name + schema, tags=tuple(tags))
        library.impl(op_name, op_func, dispatch_key or "CompositeExplicitAutograd")
        if fake_impl is not None:
            register_fake(qualname, fake_impl, lib=library)
        _registered[qualname] = (op_func, library)

        def forget() -> None:
            _registered.pop(qualname, None)
            remove_operators(library)

        return forget

    state = host_state()
    is_loading = ACTIVATING.get() is not None or state.loading.transaction is not None
    if not is_loading:
        register()
        return
    # The op of a package that several plugins import stays, whichever plugin is left out.
    provider = discover().provider_of(op_func.__module__)
    state.declare(f"torch op {qualname}", provider, register)
