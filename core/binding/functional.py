"""``Functional``, an op as a function of tensors and settings: a functional form.

``register_functional`` makes a form of a native definition. ``opgraft.functional.rms_norm(x, w)``
runs the kernel of the op ``rms_norm`` here and now: ``__call__`` asks ``_bound``, which answers
from the caches of the process. The same form is registered as ``torch.ops.opgraft.rms_norm``, for
graphs with one node per form.
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
"""The function of a form, and the native definition for calls that require a gradient.

The second is ``None`` if the function serves these calls, too. A tuple, as each eager call unpacks
one.
"""

FUNCTIONALS: Mapping[str, Functional[..., Any]] = MappingProxyType(host_state().registry.forms)
"""Every functional form by name; ``register_functional`` adds forms."""


class Functional(Generic[Arguments, Result]):
    """A functional form of an op.

    Attributes:
        name: the name in ``opgraft.functional`` and in ``torch.ops.opgraft``.
        op: the op class, by op name or class name. The form runs the bound kernel of this op.
        native: the definition in plain PyTorch. It writes only to arguments in ``mutates``.
        fake: a function of the same signature. It returns tensors of the right shape, dtype and
            device, without values.
        mutates: the names of arguments with results. Empty, except for variants in place, such as
            ``rms_norm_``.
        random: the name of an argument that makes the result random unless zero, or ``None``.
        differentiable: ``torch.ops.opgraft.<name>`` has gradients. A variant in place has none.
    """

    traced: Bound[Arguments, Result]
    DEFINED_BY = ("name", "op", "native", "fake", "mutates", "random", "differentiable")
    """The attributes that define the result. A plugin that assigns to one is reported."""

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

        # While a compiler traces a caller, this call binds the form. Compiled code then reads and
        # guards the attribute traced. There is no argument, as compilers of torch before 2.9 take
        # constants only.
        self.bind_while_traced = bind_while_traced

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        # is_compiling() takes twice as long, and is true for tracers that run this code.
        if is_dynamo_compiling():
            self.bind_while_traced()
            kernel, native_for_gradients = self.traced
        else:
            kernel, native_for_gradients = _bound(self)
        if native_for_gradients is not None and gradient_required(args, kwargs):
            # A compiler cannot trace the log.
            if not torch.compiler.is_compiling():
                host_state().log_fallback(
                    f"{kernel.__module__}.{kernel.__qualname__}", NEEDS_GRADIENT
                )
            return native_for_gradients(*args, **kwargs)
        return kernel(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<functional form {self.name} of op {self.op}>"

    def __reduce__(self) -> str:
        """Pickle a form like a function, by module and name. A copy is the form itself."""
        return self.native.__qualname__


def register_functional(
    op: str,
    fake: Callable[..., Any],
    mutates: tuple[str, ...] = (),
    random: str | None = None,
    differentiable: bool = True,
) -> Callable[[Callable[Arguments, Result]], Functional[Arguments, Result]]:
    """Return a decorator that makes a native definition a functional form of an op.

    The form is registered as ``torch.ops.opgraft.<name>`` too. About the registered op:

    - Results are contiguous tensors with the shapes of ``fake``.
    - The backward runs the native definition again, for gradients of any order. Without
      ``differentiable``, results never require a gradient. An op with ``mutates`` refuses arguments
      that require a gradient while gradients are recorded.
    - The op runs without autocast: the dtypes of results follow from the arguments alone, as a
      graph needs. The form itself follows autocast like any PyTorch code.

    The arguments are the attributes of ``Functional``.

    Raises:
        ConflictError: another form has the name. A reloaded definition of the same form replaces
            the former one.
    """

    def decorate(native: Callable[Arguments, Result]) -> Functional[Arguments, Result]:
        made = Functional(native, op, fake, mutates, random, differentiable)
        provider = discover().provider_of(native.__module__)
        host_state().declare(
            f"functional form {made.name}", provider, functools.partial(_declare_form, made)
        )
        return made

    return decorate


def _declare_form(form: Functional[..., Any]) -> Callable[[], None]:
    """Register a form under its name, and return the undo."""
    forms = host_state().registry.forms
    known = forms.get(form.name)
    if known is not None and not redefines(known, form):
        raise ConflictError(
            f"the functional form {form.name!r} is registered twice: by {_whence(known)} and by "
            f"{_whence(form)}. Rename one of them."
        )
    _register(form)
    forms[form.name] = form
    setattr(NATIVE, form.name, form.native)
    return functools.partial(unregister, form)


def unregister(form: Functional[..., Any]) -> None:
    """Forget a form. The registered op of torch stays until another form takes the name."""
    if FUNCTIONALS.get(form.name) is form:
        del host_state().registry.forms[form.name]
        delattr(NATIVE, form.name)


def _whence(form: Functional[..., Any]) -> str:
    return (
        f"{qualified(form)} at {location_of(form.native)} "
        f"({discover().provider_of(form.__module__)})"
    )


def binding_of(form: Functional[..., Any]) -> Binding:
    """Return the binding of a form's op: the form runs a function of this kernel.

    Raises:
        OpgraftError: as constructing the op would.
    """
    load_plugins()
    target: Any = host_state().registry.find_target(form.op)
    return bind(target)


def _bound(form: Functional[Arguments, Result]) -> Bound[Arguments, Result]:
    """Return the function of a form from the current caches. Every eager call comes here."""
    state = host_state()
    try:
        return state.current_caches().functions[form]
    except KeyError:
        return state.decide_once(
            lambda caches: caches.functions, form, lambda: _decide_function(form)
        )


def _decide_function(form: Functional[Arguments, Result]) -> Bound[Arguments, Result]:
    kernel = binding_of(form).kernel.winner
    function = kernel.functional(form.name) or form.native
    if kernel.inference_only and function is not form.native:
        return function, form.native
    return function, None


def _register(form: Functional[..., Any]) -> None:
    """Register the op of a form with torch: call, fake rule and gradients."""

    @functools.wraps(form.native)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast((*args, *kwargs.values())):
            return _contiguous(form(*args, **kwargs))

    # The op runs the form, so a graph runs the kernel that is bound when the graph runs.
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
    """Apply the fake rule.

    Raises:
        ValueError: an argument is on the device ``meta``, and a result is not.
    """
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
    """Raise ``ValueError``: the op would write in place, and an argument requires a gradient."""
    pure = form.name.removesuffix("_")
    instead = (
        f"use torch.ops.opgraft.{pure}"
        if pure in FUNCTIONALS and pure != form.name
        else "give it detached"
    )
    raise ValueError(
        f"{form.name}: {argument} requires a gradient, and {' and '.join(form.mutates)} would be "
        f"written to in place where a gradient is required: {instead}, or use torch.no_grad()"
    )


def _mark_constant(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.mark_non_differentiable(*((output,) if isinstance(output, Tensor) else output))


def _no_backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
    return (None,) * len(ctx.needs_input_grad)


def _save(form: Functional[..., Any], ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep the arguments of a call for the backward.

    Raises:
        ValueError: the result is random, and the backward would draw other numbers.
    """
    if form.random and (
        value := dict(zip(signature(form.native).parameters, inputs, strict=False)).get(form.random)
    ):
        raise ValueError(
            f"{form.name}: {form.random} is {value}, expected 0 where torch.ops.opgraft."
            f"{form.name} is differentiated: its backward computes the result again"
        )
    ctx.save_for_backward(*(value for value in inputs if isinstance(value, Tensor)))
    # In tuples, as None may be a setting too.
    ctx.settings = [None if isinstance(value, Tensor) else (value,) for value in inputs]


def _backward(
    native: Callable[..., Any], ctx: Any, *gradients: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of all arguments: run the native definition again under autograd."""
    saved = iter(ctx.saved_tensors)
    # Shorter than the arguments, if the call left out defaults.
    needed = ctx.needs_input_grad
    with _without_autocast(ctx.saved_tensors):
        with torch.enable_grad():
            # Views: one tensor in the place of two arguments has two gradients.
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
    """Return the gradient of each variable, by pairs of an output and the output's gradient."""
    if not pairs:
        return [None] * len(variables)
    outputs, upstream = zip(*pairs, strict=True)
    return torch.autograd.grad(
        outputs, variables, upstream, allow_unused=True, create_graph=torch.is_grad_enabled()
    )
