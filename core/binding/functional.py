"""``Functional``, an op as a function of tensors and settings.

A form is called like the function that it was made from and runs the kernel that the op is bound to here and now. The
same function is registered as ``torch.ops.opgraft.<name>``, for graphs that must show it as one node.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar

import torch
from opgraft.binding.derivation import NATIVE
from opgraft.binding.marks import NEEDS_GRADIENT, gradient_required
from opgraft.binding.specialisation import Binding, bind
from opgraft.compat.registration import on_gradients
from opgraft.compat.tracing import constant_while_tracing
from opgraft.errors import ConflictError
from opgraft.plugins.discovery import discover
from opgraft.plugins.host import load_plugins
from opgraft.registry.declarations import redefines
from opgraft.registry.op_classes import location_of, qualified
from opgraft.registry.state import host_state
from torch import Tensor
from torch.compiler import is_dynamo_compiling

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

Bound: TypeAlias = tuple[Callable[Arguments, Result], Callable[Arguments, Result] | None]
"""The kernel that a form runs, and what it runs where a gradient is required and the kernel has no backward."""

_functionals: dict[str, Functional[..., Any]] = {}

FUNCTIONALS: Mapping[str, Functional[..., Any]] = MappingProxyType(_functionals)
"""Every functional form by its name, as ``register_functional`` makes them known."""


class Functional(Generic[Arguments, Result]):
    """A functional form of an op.

    Attributes:
        name: its name in ``opgraft.functional`` and in ``torch.ops.opgraft``.
        op: the op class, by op name or class name, whose bound kernel it runs.
        native: the definition in plain PyTorch, which never writes to its arguments unless they are in ``mutates``.
        fake: the same signature; returns tensors of the right shape, dtype and device without values.
        mutates: the arguments that it writes to; empty but for the in-place variants, whose names end in ``_``.
        random: the argument that makes the result random unless it is zero, if there is one.
        differentiable: whether the registered op has gradients. That of an in-place variant has none.
    """

    traced: Bound[Arguments, Result]
    DEFINED_BY = ("name", "op", "native", "fake", "mutates", "random", "differentiable")
    """The attributes that say what it computes. A plugin that assigns to one while it is loaded is reported."""

    def __init__(
        self,
        native: Callable[Arguments, Result],
        op: str,
        fake: Callable[..., Any],
        mutates: tuple[str, ...],
        random: str | None,
        differentiable: bool,
    ) -> None:
        functools.update_wrapper(self, native)
        self.name = native.__name__
        self.op = op
        self.native = native
        self.fake = fake
        self.mutates = mutates
        self.random = random
        self.differentiable = differentiable and not mutates

        @constant_while_tracing
        def bind_while_traced() -> None:
            self.traced = _bound(self)

        # Binds the form while a compiler traces its caller, which then reads and guards the attribute. Without an
        # argument, as compilers of torch before 2.9 take constants only.
        self.bind_while_traced = bind_while_traced

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        # Half the price of is_compiling(), which is true of tracers that run this as it
        # is.
        if is_dynamo_compiling():
            self.bind_while_traced()
            kernel, differentiable = self.traced
        else:
            kernel, differentiable = _bound(self)
        if differentiable is not None and gradient_required(args, kwargs):
            if not torch.compiler.is_compiling():
                host_state().log_fallback(
                    f"{kernel.__module__}.{kernel.__qualname__}", NEEDS_GRADIENT
                )
            return differentiable(*args, **kwargs)
        return kernel(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<functional form {self.name} of op {self.op}>"

    def __reduce__(self) -> str:
        """Pickle a form as functions are, by module and name; it is its own copy."""
        return self.native.__qualname__


def register_functional(
    op: str,
    fake: Callable[..., Any],
    mutates: tuple[str, ...] = (),
    random: str | None = None,
    differentiable: bool = True,
) -> Callable[[Callable[Arguments, Result]], Functional[Arguments, Result]]:
    """Decorate a native definition: it becomes a functional form of an op, and ``torch.ops.opgraft.<name>``.

    The registered op returns contiguous tensors, of which ``fake`` says the shapes. Its backward, however often it is
    differentiated, is that of the native definition, which it runs again. Results of one that is not ``differentiable``
    never require a gradient. One that writes to its arguments refuses those that do, while gradients are recorded.

    The registered op runs without autocast, so that the dtypes of its results follow from those of its arguments, as a
    graph that shows it as one node must be told. The form itself is under autocast what its PyTorch code is.

    Raises:
        ConflictError: another form has the name. A reloaded definition of the same takes its place.
    """

    def decorate(native: Callable[Arguments, Result]) -> Functional[Arguments, Result]:
        made = Functional(native, op, fake, mutates, random, differentiable)
        provider = discover().provider_of(native.__module__)
        host_state().declare(
            f"functional form {made.name}", provider, functools.partial(_add, made)
        )
        return made

    return decorate


def _add(form: Functional[..., Any]) -> Callable[[], None]:
    """Make a form known under its name; returns the undo."""
    known = _functionals.get(form.name)
    if known is not None and not redefines(known, form):
        raise ConflictError(
            f"the functional form {form.name!r} is registered twice: by {_whence(known)} and by {_whence(form)}. "
            "Rename one of them."
        )
    _register(form)
    _functionals[form.name] = form
    setattr(NATIVE, form.name, form.native)
    return functools.partial(unregister, form)


def unregister(form: Functional[..., Any]) -> None:
    """Forget a form. What torch has registered stays until another form takes the name."""
    if _functionals.get(form.name) is form:
        del _functionals[form.name]
        delattr(NATIVE, form.name)


def _whence(form: Functional[..., Any]) -> str:
    return f"{qualified(form)} at {location_of(form.native)} ({discover().provider_of(form.__module__)})"


def binding_of(form: Functional[..., Any]) -> Binding:
    """Return the choice of class and kernel that decides what a form runs.

    Raises:
        OpgraftError: as constructing the op would.
    """
    load_plugins()
    target: Any = host_state().registry.find_target(form.op)
    return bind(target)


def _bound(form: Functional[Arguments, Result]) -> Bound[Arguments, Result]:
    """Return the kernel that a form runs, from the cache of bound classes; the path that every eager call takes."""
    state = host_state()
    try:
        return state.current_caches().functions[form]
    except KeyError:
        return state.decide_once(lambda caches: caches.functions, form, lambda: _decide(form))


def _decide(form: Functional[Arguments, Result]) -> Bound[Arguments, Result]:
    kernel = binding_of(form).kernel.winner
    function = kernel.functional(form.name) or form.native
    if kernel.inference_only and function is not form.native:
        return function, form.native
    return function, None


def _register(form: Functional[..., Any]) -> None:
    @functools.wraps(form.native)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast((*args, *kwargs.values())):
            return _contiguous(form(*args, **kwargs))

    op = f"opgraft::{form.name}"
    registered = torch.library.custom_op(op, run, mutates_args=form.mutates)
    registered.register_fake(functools.partial(_faked, form))
    if form.mutates:
        on_gradients(op, functools.partial(_refuse, form))
    elif form.differentiable:
        registered.register_autograd(
            functools.partial(_backward, form.native), setup_context=functools.partial(_save, form)
        )
    else:
        # Without a formula torch lets results require a gradient, and raises in the backward pass.
        registered.register_autograd(_no_backward, setup_context=_mark_constant)


def _faked(form: Functional[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Apply the fake rule; raise where an argument is on ``meta`` and a result is not."""
    result = form.fake(*args, **kwargs)
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    made = [result] if isinstance(result, Tensor) else result or given
    if any(x.is_meta for x in given) and not all(y.is_meta for y in made):
        devices = ", ".join(str(x.device) for x in given)
        raise ValueError(f"{form.name}: the tensors are on {devices}, expected one device")
    return result


def _without_autocast(values: Iterable[Any]) -> AbstractContextManager[Any]:
    """Return a context without autocast for the device of the first tensor among ``values``."""
    device = next((value.device.type for value in values if isinstance(value, Tensor)), "cpu")
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def _contiguous(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.contiguous()
    return tuple(value.contiguous() for value in result) if isinstance(result, tuple) else result


def _refuse(form: Functional[..., Any], argument: str) -> None:
    pure = form.name.removesuffix("_")
    instead = (
        f"use torch.ops.opgraft.{pure}"
        if pure in FUNCTIONALS and pure != form.name
        else "give it detached"
    )
    raise ValueError(
        f"{form.name}: {argument} requires a gradient, and {' and '.join(form.mutates)} would be written to in place "
        f"where a gradient is required: {instead}, or use torch.no_grad()"
    )


def _mark_constant(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.mark_non_differentiable(*((output,) if isinstance(output, Tensor) else output))


def _no_backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
    return (None,) * len(ctx.needs_input_grad)


def _save(form: Functional[..., Any], ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    if form.random and (
        value := dict(zip(signature(form.native).parameters, inputs, strict=False)).get(form.random)
    ):
        raise ValueError(
            f"{form.name}: {form.random} is {value}, expected 0 where torch.ops.opgraft.{form.name} is differentiated: "
            "its backward computes the result again"
        )
    ctx.save_for_backward(*(value for value in inputs if isinstance(value, Tensor)))
    # In tuples, as None may be a setting too.
    ctx.settings = [None if isinstance(value, Tensor) else (value,) for value in inputs]


def _backward(
    native: Callable[..., Any], ctx: Any, *gradients: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Compute the gradients by all arguments, by running the native definition again under autograd."""
    saved = iter(ctx.saved_tensors)
    needed = ctx.needs_input_grad  # shorter than the arguments where defaults were left out
    with _without_autocast(ctx.saved_tensors):
        with torch.enable_grad():
            # Views, as one tensor in the place of two arguments has two gradients, and theirs lead back to it.
            arguments = [
                _view(next(saved)) if setting is None else setting[0] for setting in ctx.settings
            ]
            result = native(*arguments)
        outputs = [result] if isinstance(result, Tensor) else list(result)
        pairs = [
            (y, g)
            for y, g in zip(outputs, gradients, strict=True)
            if g is not None and y.requires_grad
        ]
        variables = [x for x, needs in zip_longest(arguments, needed) if needs]
        found = iter(_gradients(pairs, variables))
    return tuple(next(found) if needs else None for needs in needed)


def _view(x: Tensor) -> Tensor:
    return x.view_as(x)


def _gradients(
    pairs: Sequence[tuple[Tensor, Tensor]], variables: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    if not pairs:
        return [None] * len(variables)
    outputs, upstream = zip(*pairs, strict=True)
    return torch.autograd.grad(
        outputs, variables, upstream, allow_unused=True, create_graph=torch.is_grad_enabled()
    )
