"""Convolutions and scans of state spaces, in mixers that call functions of their file for them.

Such a function is recognised by running it on random tokens, in each precision, with each of its options, with and
without its optional arguments, and comparing what it returns, and writes into states, with what the op makes of the
same call. Calls that the op was not made for, and those that need a gradient, go to the function of the file.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Iterator
from itertools import product
from types import FunctionType
from typing import Any

import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.grafting import plamo_calls, scan_calls
from opgraft.grafting.forwards import Substitution, check_forward, plain_forward
from opgraft.grafting.scan_calls import IMPLEMENTATIONS
from opgraft.grafting.scan_forms import Form, Options
from opgraft.grafting.traced import once_per_function
from opgraft.registry.adapter import LeaveAlone
from torch import Tensor, nn

ADAPTER = "function of a state space"
_CHILD = "opgraft_{}"
_FORMS = (*scan_calls.FORMS, *plamo_calls.FORMS)
_Function = Callable[..., Any]


def functions_of(module: nn.Module) -> Iterator[str]:
    """Name the functions by which the forward of a module convolves or scans, but for those that an op stands for."""
    forward = plain_forward(module)
    if not isinstance(forward, FunctionType):
        return
    for name in forward.__code__.co_names:
        found = forward.__globals__.get(name)
        if (
            _forms(name)
            and isinstance(found, FunctionType)
            and _CHILD.format(name) not in module._modules
        ):
            yield name


def op_of(module: nn.Module, name: str) -> CustomOp:
    """Construct the op that does the work of the function ``name``.

    Raises:
        LeaveAlone: no op does, or none faster.
    """
    obstacle = check_forward(module)
    if obstacle:
        raise LeaveAlone(obstacle)
    function = plain_forward(module).__globals__[name]
    other = _other_implementation(function)
    if other:
        raise LeaveAlone(f"{name} calls {other}")
    form = form_of(function)
    if form is None:
        raise LeaveAlone(f"{name} computes something else than {_forms(name)[0].op_name}")
    op = form.make(module)
    if op.binding.kernel.winner.method == "forward_native" and not form.native_gains:
        raise LeaveAlone(f"here {form.op_name} is its native definition, which is no faster")
    return op


def substitution_of(name: str) -> Substitution:
    """Lead the name of a function, which ``op_of`` has passed, to the op."""
    return Substitution(name, _CHILD.format(name), _with_op)


def _forms(name: str) -> list[Form]:
    return [form for form in _FORMS if form.hint in name]


def _with_op(op: nn.Module, function: _Function) -> _Function:
    form = form_of(
        function
    )  # ``None`` for a model that was unpickled beside another version of its file
    return function if form is None else functools.partial(_by_op, op, function, form.call)


def _by_op(op: nn.Module, function: _Function, call: _Function, *args: Any, **kwargs: Any) -> Any:
    """Do what the file's function does, by the op where it takes the call and no gradient is required."""
    if torch.is_grad_enabled() and any(
        isinstance(t, Tensor) and t.requires_grad for t in (*args, *kwargs.values())
    ):
        return function(*args, **kwargs)
    made = call(op, *args, **kwargs)
    return function(*args, **kwargs) if made is None else made


def _other_implementation(function: FunctionType) -> str:
    """Name another function that a decorator may call in the place of what it decorates, "" if there is none."""
    plain = inspect.unwrap(function)
    held = (
        [cell.cell_contents for cell in function.__closure__ or ()] if plain is not function else []
    )
    others = [
        each for each in held if callable(each) and not isinstance(each, type) and each is not plain
    ]
    return f"{others[0].__module__}.{others[0].__name__}" if others else ""


def form_of(function: _Function) -> Form | None:
    """Find what a function computes, ``None`` if it is nothing that is known here."""
    return _found(inspect.unwrap(function))


@once_per_function
def _found(plain: _Function) -> Form | None:
    return next((form for form in _forms(plain.__name__) if _computes(plain, form)), None)


_TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.02}
_SIZES = ((2, 5), (1, 1), (1, 130))
"""Rows and tokens, with those on which functions might branch, or of which they might drop what is single."""


def _computes(function: _Function, form: Form) -> bool:
    """Return whether a function returns and writes, for every call that a form knows, what its op does."""
    names = [name for name in _named(function) if name not in IMPLEMENTATIONS]
    if names != _named(form.call)[1 : len(names) + 1] or _reads_others(function):
        return False
    calls = [*product((torch.float32,), _SIZES), *product(_TOLERANCES, _SIZES[:1])]
    trials = product(calls, form.trials(function))
    return all(
        _agrees(function, form, dtype, options, *sizes) for (dtype, sizes), options in trials
    )


def _named(function: _Function) -> list[str]:
    """List the arguments in the order in which callers give those that they do not name."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _reads_others(function: _Function) -> bool:
    """Return whether a function looks at the arguments that it has no names for."""
    parameters = inspect.signature(function).parameters.values()
    rest = {p.name for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    return any(instruction.argval in rest for instruction in dis.get_instructions(function))


def _agrees(
    function: _Function, form: Form, dtype: torch.dtype, options: Options, batch: int, tokens: int
) -> bool:
    (args, kwargs), (own_args, own_kwargs) = (
        form.draw(dtype, options, batch, tokens) for _ in range(2)
    )
    wanted = form.call(form.native(options), *own_args, **own_kwargs)
    try:
        with torch.no_grad():
            found = function(*args, **kwargs)
    except Exception:  # whatever a function of another kind raises
        return False
    pairs = zip(_tensors([found, *args]), _tensors([wanted, *own_args]), strict=False)
    same_kind = type(found) is type(wanted) and len(_tensors([found])) == len(_tensors([wanted]))
    return same_kind and all(_agree(a, b, _TOLERANCES[dtype]) for a, b in pairs)


def _tensors(values: list[Any]) -> list[Tensor]:
    flat = [each for value in values for each in (value if isinstance(value, tuple) else (value,))]
    return [each for each in flat if isinstance(each, Tensor)]


def _agree(found: Tensor, wanted: Tensor, tolerance: float) -> bool:
    alike = (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    return alike and torch.allclose(
        found, wanted, atol=tolerance * max(1.0, float(wanted.abs().max())), rtol=tolerance
    )
