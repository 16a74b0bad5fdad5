"""Models whose ops show in a graph: each call of a functional form is one node, a semantic one."""

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
"""By the class that defines ``forward_native``, the definition on forms to capture in its place."""


class _RegisteredOps:
    """The registered op of every form, as an attribute by the form's name."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.ops.opgraft, name).default


@contextmanager
def semantic(model: nn.Module, natives: Natives) -> Iterator[None]:
    """Have all forms, and the ops of ``model`` that are made of forms, call the registered ops within the block.

    That is so whether an op is enabled or not, and whoever provides its kernel, if functional forms are that kernel. A
    kernel that is a method and nothing else stays what it is. What other threads compute with the model is the same.
    """
    changed: list[tuple[CustomOp, type]] = []
    try:
        for module in model.modules():
            kind = _semantic_class(module, natives) if isinstance(module, CustomOp) else None
            if kind is not None:
                changed.append((module, type(module)))  # type: ignore[arg-type]  # a class is for ops only
                module.__class__ = kind
        with (
            _forms_registered(),
            captured_for_opgraft(),
            set_config(OpgraftConfig(), origin="capture"),
        ):
            bound = host_state().current_caches().functions  # of this scope, so of this thread
            bound.update((form, (_as_node(form), None)) for form in FUNCTIONALS.values())
            yield
    finally:
        for op, former in changed:
            op.__class__ = former


@contextmanager
def _forms_registered() -> Iterator[None]:
    """Have each form that is called while a compiler looks on call its registered op."""
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
    """Return what calls the registered op of a form, and within that, as where torch computes constants, its native."""
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
    """Return the class of an op whose ``forward`` is its native definition on registered ops, where it has one."""
    kind: Any = type(op)
    native = _native_on_forms(op, natives) if kind is op.binding.specialisation else None
    if native is None:
        return None
    # vars(), as a class derived from another specialisation must not find its.
    if _CACHE not in vars(kind):
        forward: Any = with_functional(native, _RegisteredOps())
        if isinstance(inspect.getattr_static(kind, "forward_native", None), staticmethod):
            forward = staticmethod(forward)
        names = {
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            "__specialisation__": True,
        }
        setattr(kind, _CACHE, type(kind)(kind.__name__, (kind,), {**names, "forward": forward}))
    made: type = vars(kind)[_CACHE]
    return made


def _native_on_forms(op: CustomOp, natives: Natives) -> Any:
    """Return the ``forward_native`` by which the kernel of an op calls forms, ``None`` where it calls none."""
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
