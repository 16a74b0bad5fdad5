"""Marks that kernels carry: what they need, and that they have no backward; with the test for gradients behind it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

import torch
from opgraft.base.text import described
from opgraft.compat.tracing import transformed
from opgraft.errors import RegistrationError, raised_at
from opgraft.plugins.discovery import discover
from opgraft.registry.op_classes import NEEDS, location_of
from opgraft.registry.state import host_state
from opgraft.registry.watching import watched
from torch import Tensor, is_grad_enabled

Function = TypeVar("Function", bound=Callable[..., Any])

NEEDS_GRADIENT = "a gradient is required, and it has no backward"
"""The reason why a call of a kernel that is marked ``inference_only`` runs the native definition."""

CHECK_RAISED = "its needs() check raised"
"""The beginning of the reason why a kernel is not used whose check is at fault."""

SWITCH_RAISED = "its enabled() raised"
"""The beginning of the reason why an op is disabled whose class was asked in vain."""

_INFERENCE_ONLY = "__opgraft_inference_only__"
_FALLS_BACK = "__opgraft_falls_back__"


def needs(check: Callable[[], str | None]) -> Callable[[Function], Function]:
    """Mark a ``forward_<key>`` that cannot run everywhere: ``check()`` says what is missing here, or returns ``None``.

    It is asked whenever an op is bound. A kernel that misses something is not chosen, and the decision shows why.
    """

    def decorate(kernel: Function) -> Function:
        setattr(kernel, NEEDS, check)
        return kernel

    return decorate


def unmet_need(kernel: object, name: str) -> str | None:
    """Return what the kernel ``name`` needs and this installation lacks, ``None`` where nothing is missing."""
    check = getattr(kernel, NEEDS, None)
    if check is None:
        return None
    provider = discover().provider_of(getattr(kernel, "__module__", None) or "")
    try:
        with watched(f"the check of what {name} of {provider} needs", provider):
            missing = check()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin's code; the reason stays in the decision
        return f"{CHECK_RAISED} {described(error)} at {raised_at(error)}"
    if missing is None or isinstance(missing, str):
        return missing
    wrong = TypeError(
        f"a value of type {type(missing).__name__}, expected a reason as str, or None"
    )
    return f"{CHECK_RAISED} {described(wrong)} at {location_of(check)}"


def falls_back(when: str) -> Callable[[Function], Function]:
    """Mark a ``forward`` or ``forward_<key>`` with what it runs instead of its kernel, and when, for the decision."""

    def decorate(kernel: Function) -> Function:
        setattr(kernel, _FALLS_BACK, when)
        return kernel

    return decorate


def fallback_of(kernel: object) -> str | None:
    """Return when a kernel runs something else instead, and what, as its mark says."""
    return getattr(kernel, _FALLS_BACK, None)


def inference_only(kernel: Function) -> Function:
    """Mark a ``forward_<key>`` that has no backward: where a gradient is required, the native definition runs instead.

    A gradient is required if grad mode is on and a parameter of the op, or a tensor among the arguments (in lists,
    tuples and dictionaries too), requires one; and, in any grad mode, under forward-mode differentiation and
    ``torch.func``.

    Raises:
        RegistrationError: it marks a static or class method, which does not know the op that it runs for.
    """
    if isinstance(kernel, (staticmethod, classmethod)):
        raise RegistrationError(
            f"inference_only marks a method that takes self, not a {type(kernel).__name__}"
        )

    @functools.wraps(kernel)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if gradient_required(args, kwargs, self):
            if not torch.compiler.is_compiling():
                host_state().log_fallback(
                    f"{self.op_class.__qualname__}.{kernel.__name__}", NEEDS_GRADIENT
                )
            return self.forward_native(*args, **kwargs)
        return kernel(self, *args, **kwargs)

    setattr(guarded, _INFERENCE_ONLY, True)
    return cast(Function, guarded)


def is_inference_only(kernel: object) -> bool:
    """Return whether a kernel has no backward, so that the native definition runs where a gradient is required."""
    return bool(getattr(kernel, _INFERENCE_ONLY, False))


def gradient_required(
    args: Iterable[Any], kwargs: Mapping[str, Any], op: torch.nn.Module | None = None
) -> bool:
    """Return whether a call must be differentiable: with these arguments, and with the parameters of ``op``."""
    if transformed():
        return True
    if not is_grad_enabled():  # so that parameters are not listed in vain
        return False
    if kwargs or op is not None:
        args = (*args, *kwargs.values(), *([] if op is None else op.parameters()))
    for (
        value
    ) in args:  # no generator, no call of another function: every eager call of a form comes by
        if isinstance(value, Tensor):
            if value.requires_grad:
                return True
        elif isinstance(value, (list, tuple)):
            if gradient_required(value, {}):
                return True
        elif isinstance(value, dict) and gradient_required((), value):
            return True
    return False


def requires_gradient(*tensors: Tensor | None) -> bool:
    """Tell whether autograd wants to know what is computed from these.

    For kernels that ask ``watched()`` of ``torch.func`` and forward-mode differentiation, which nothing here sees.
    """
    return is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
