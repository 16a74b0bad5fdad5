"""Marks on kernels: ``needs``, ``falls_back`` and ``inference_only``, with the test for gradients.

A mark is an attribute of the method. Binding reads the marks; ``inference_only`` wraps the method
besides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

import torch
from opgraft.base.text import described
from opgraft.compat.tracing import transformed
from opgraft.errors import RegistrationError, raised_at
from opgraft.plugins.discovery import discover
from opgraft.registry.decision import Provider
from opgraft.registry.op_classes import NEEDS, location_of
from opgraft.registry.state import StateValue, host_state
from opgraft.registry.watching import Keeping, watching_code
from torch import Tensor, is_grad_enabled

Function = TypeVar("Function", bound=Callable[..., Any])

NEEDS_GRADIENT = "a gradient is required, and it has no backward"
"""The reason why a call of an ``inference_only`` kernel runs the native definition."""

_KEEPINGS = StateValue[dict[tuple[int, str], Keeping]](dict)
"""The watch over the ``needs`` check of each kernel, until the check has replaced nothing."""

_INFERENCE_ONLY = "__opgraft_inference_only__"
_FALLS_BACK = "__opgraft_falls_back__"


class CheckRaised(str):
    """The reason why a kernel with a faulty ``needs`` check is not used."""


class SwitchRaised(str):
    """The reason why an op with a faulty ``enabled`` is disabled."""


def needs(check: Callable[[], str | None]) -> Callable[[Function], Function]:
    """Mark a ``forward_<key>`` that cannot run on every machine.

    Args:
        check: returns the reason why the kernel cannot run here, such as ``"needs AVX-512"``, or
            ``None``. Each binding of an op calls the check. A kernel with a reason is not chosen,
            and the decision shows the reason.

    Raises:
        RegistrationError: the check is no function.
    """
    if not callable(check):
        raise RegistrationError(
            f"opgraft.needs has the check {check!r:.80}: use a function without parameters that "
            "returns the reason why the kernel cannot run, or None"
        )

    def decorate(kernel: Function) -> Function:
        setattr(kernel, NEEDS, check)
        return kernel

    return decorate


def unmet_need(kernel: object, name: str) -> str | None:
    """Return the reason why the kernel ``name`` cannot run here, ``None`` if it can.

    A check that raises, or answers with another type, is a reason too.
    """
    check = getattr(kernel, NEEDS, None)
    if check is None:
        return None
    provider = discover().provider_of(getattr(kernel, "__module__", None) or "")
    what = f"the check of what {name} of {provider} needs"
    try:
        # A function of torch that the check replaces is put back, and a finding names the check.
        with watching_code(what, provider), _keeping(what, provider, check).step():
            missing = check()
    except KeyboardInterrupt:
        raise
    # A plugin's code may raise anything. The decision keeps the reason.
    except BaseException as error:
        return _check_raised(error, raised_at(error))
    if missing is None or isinstance(missing, str):
        return missing
    kind = type(missing).__name__
    wrong = TypeError(f"a value of type {kind}, expected a reason as str, or None")
    return _check_raised(wrong, location_of(check))


def _keeping(what: str, provider: Provider, check: object) -> Keeping:
    # By identity, as a check may be an object that cannot be hashed. Each Keeping holds its check.
    # Kernels of two distributions may share a check.
    return _KEEPINGS.get().setdefault((id(check), what), Keeping(what, provider, check))


def _check_raised(error: BaseException, place: str | None) -> CheckRaised:
    return CheckRaised(f"its needs() check raised {described(error)} at {place}")


def falls_back(when: str) -> Callable[[Function], Function]:
    """Mark a ``forward`` or ``forward_<key>`` that sometimes runs other code than its kernel.

    Args:
        when: the case and the other code, in words for the decision.
    """

    def decorate(kernel: Function) -> Function:
        setattr(kernel, _FALLS_BACK, when)
        return kernel

    return decorate


def fallback_of(kernel: object) -> str | None:
    """Return the words of the ``falls_back`` mark, ``None`` without a mark."""
    return getattr(kernel, _FALLS_BACK, None)


def inference_only(kernel: Function) -> Function:
    """Mark a ``forward_<key>`` without a backward: for a gradient, the native definition runs.

    A gradient is required if grad mode is on, and a parameter of the op or a tensor among the
    arguments requires one. Tensors in lists, tuples and dictionaries count too. Forward-mode
    differentiation and ``torch.func`` require a gradient in any grad mode.

    Raises:
        RegistrationError: the method is static or a class method, and is not given the op.
    """
    if isinstance(kernel, (staticmethod, classmethod)):
        raise RegistrationError(
            f"inference_only marks a method that takes self, not a {type(kernel).__name__}"
        )

    @functools.wraps(kernel)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if gradient_required(args, kwargs, self):
            # A compiler cannot trace the log.
            if not torch.compiler.is_compiling():
                host_state().log_fallback(
                    f"{self.op_class.__qualname__}.{kernel.__name__}", NEEDS_GRADIENT
                )
            return self.forward_native(*args, **kwargs)
        return kernel(self, *args, **kwargs)

    setattr(guarded, _INFERENCE_ONLY, True)
    return cast(Function, guarded)


def is_inference_only(kernel: object) -> bool:
    """Return True if a kernel has the ``inference_only`` mark."""
    return bool(getattr(kernel, _INFERENCE_ONLY, False))


def gradient_required(
    args: Iterable[Any], kwargs: Mapping[str, Any], op: torch.nn.Module | None = None
) -> bool:
    """Return True if a call must be differentiable.

    Args:
        args: the arguments of the call.
        kwargs: the keyword arguments of the call.
        op: an op with parameters that may require a gradient; ``None`` for a functional form.
    """
    if transformed():
        return True
    # Listing the parameters below takes longer.
    if not is_grad_enabled():
        return False
    if kwargs or op is not None:
        args = (*args, *kwargs.values(), *([] if op is None else op.parameters()))
    # Every eager call of a form comes by: a generator or another function would cost time.
    for value in args:
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
    """Return True if autograd records a computation from these tensors.

    ``torch.func`` and forward-mode differentiation are not seen: kernels ask
    ``opgraft.kernels.watched()`` for those.
    """
    return is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
