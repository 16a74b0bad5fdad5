"""Models with semantic nodes: in a captured graph, each call of a functional form is one node."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.derivation import takes_functional, with_functional
from opgraft.binding.functional import FUNCTIONALS, Functional
from opgraft.compat.tracing import captured_for_opgraft, constant_while_tracing
from opgraft.config import OpgraftConfig, set_config
from opgraft.registry.op_classes import definer
from opgraft.registry.state import host_state
from torch import nn

_CACHE = "__opgraft_semantic__"


Natives = Mapping[type, Callable[..., Any]]
"""By the class of a ``forward_native``, another definition on forms to capture in its place."""


class _RegisteredOps:
    """The registered op of every form, as attributes by the names of the forms."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.ops.opgraft, name).default


@contextmanager
def semantic(model: nn.Module, natives: Natives) -> Iterator[None]:
    """Within the block, have all forms call their registered ops, and the ops of ``model`` too.

    Enabled and disabled ops alike do so, with any provider, if functional forms are the kernel.
    A kernel without functions for forms stays as it is. Other threads get the same results from
    the model meanwhile.
    """
    changed: list[tuple[CustomOp, type]] = []
    try:
        for module in model.modules():
            if not isinstance(module, CustomOp):
                continue
            kind = _semantic_class(module, natives)
            if kind is not None:
                changed.append((module, type(module)))
                module.__class__ = kind
        with (
            _forms_registered(),
            captured_for_opgraft(),
            set_config(OpgraftConfig(), origin="capture"),
        ):
            # The caches belong to this scope, and the scope to this thread.
            bound = host_state().current_caches().functions
            for form in FUNCTIONALS.values():
                bound[form] = _as_node(form), None
            yield
    finally:
        for op, former in changed:
            op.__class__ = former


@contextmanager
def _forms_registered() -> Iterator[None]:
    """While a compiler traces, have each called form call its registered op."""
    forms = [(form, form.bind_while_traced) for form in FUNCTIONALS.values()]

    def register(form: Any) -> Callable[[], None]:
        @constant_while_tracing
        def take_registered() -> None:
            form.traced = getattr(torch.ops.opgraft, form.name).default, None

        return take_registered

    try:
        for form, _ in forms:
            form.bind_while_traced = register(form)
        yield
    finally:
        for form, former in forms:
            form.bind_while_traced = former


def _as_node(form: Functional[..., Any]) -> Callable[..., Any]:
    """Return a function that calls the registered op of a form.

    The registered op calls the form again where torch computes constants. That call runs the native
    definition.
    """
    registered = getattr(torch.ops.opgraft, form.name).default
    inside = False

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:
            return form.native(*args, **kwargs)
        inside = True
        try:
            return registered(*args, **kwargs)
        finally:
            inside = False

    return call


def _semantic_class(op: CustomOp, natives: Natives) -> type | None:
    """Return a class for an op with the native definition on registered ops as ``forward``.

    ``None`` if the op stays as it is.
    """
    kind: Any = type(op)
    native = _native_on_forms(op, natives) if kind is op.bound_class else None
    if native is None:
        return None
    # vars(), as getattr() would find the class of another specialisation.
    if _CACHE not in vars(kind):
        forward: Any = with_functional(native, _RegisteredOps())
        if isinstance(inspect.getattr_static(kind, "forward_native", None), staticmethod):
            forward = staticmethod(forward)
        namespace = {
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            "__specialisation__": True,
            "forward": forward,
        }
        setattr(kind, _CACHE, type(kind)(kind.__name__, (kind,), namespace))
    made: type = vars(kind)[_CACHE]
    return made


def _native_on_forms(op: CustomOp, natives: Natives) -> Any:
    """Return the ``forward_native`` of an op on forms, ``None`` if the kernel calls no forms."""
    kernel = op.binding.kernel.winner
    if kernel.method != "forward_native" and kernel.functions is None:
        return None
    owner = definer(kernel.owner, "forward_native")
    if owner is None:
        return None
    if owner in natives:
        return natives[owner]
    native = vars(owner)["forward_native"]
    native = native.__func__ if isinstance(native, staticmethod) else native
    return native if isinstance(native, FunctionType) and takes_functional(native) else None
