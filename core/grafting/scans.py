"""Convolutions and scans of state spaces, in mixers that call functions of the same file.

Such a function is recognised by trials. The function runs on random tokens, in each precision,
with each option, with and without the optional arguments. Results and writes into states must
equal those of the op. Calls that the op was not made for, and calls that need a gradient, go to
the function.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Mapping
from itertools import product
from types import FunctionType
from typing import Any

import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.grafting import plamo_calls, scan_calls
from opgraft.grafting.forwards import expect_plain_forward
from opgraft.grafting.scan_calls import IMPLEMENTATIONS
from opgraft.grafting.scan_forms import Options, ScanForm
from opgraft.grafting.traced import once_per_function
from opgraft.registry.adapter import CallAdapter, FunctionCall, LeaveAlone
from torch import Tensor, nn

_FORMS = (*scan_calls.FORMS, *plamo_calls.FORMS)
_Function = Callable[..., Any]


def _recognise(form: ScanForm, call: FunctionCall) -> Mapping[str, Any] | None:
    """Accept a function of this form, and return the settings of the mixer."""
    if form.hint not in call.name or not isinstance(call.found, FunctionType):
        return None
    expect_plain_forward(call.module)
    other = _other_implementation(call.found)
    if other:
        raise LeaveAlone(f"{call.name} calls {other}")
    if form_of(call.found) is not form:
        return None
    return form.settings(vars(call.module))


def _refuse(call: FunctionCall) -> None:
    """Leave other functions with the name of a state-space function alone."""
    forms = _forms(call.name)
    if forms and isinstance(call.found, FunctionType):
        raise LeaveAlone(f"{call.name} computes something else than {forms[0].op_name}")


def _forms(name: str) -> list[ScanForm]:
    return [form for form in _FORMS if form.hint in name]


def _with_op(op: nn.Module, function: _Function) -> _Function:
    form = form_of(function)
    if form is None:  # a model that was unpickled beside another version of its file
        return function
    return functools.partial(_by_op, op, function, form.call)


_NAME = "function of a state space"
ADAPTERS = (
    *(
        CallAdapter(
            _NAME,
            form.op,
            functools.partial(_recognise, form),
            _with_op,
            native_gains=form.native_gains,
        )
        for form in _FORMS
    ),
    CallAdapter(_NAME, CustomOp, _refuse, _with_op),
)


def _by_op(op: nn.Module, function: _Function, call: _Function, *args: Any, **kwargs: Any) -> Any:
    """Do the work of the file's function, by the op unless a gradient is required."""
    if torch.is_grad_enabled():
        tensors = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
        if any(tensor.requires_grad for tensor in tensors):
            return function(*args, **kwargs)
    made = call(op, *args, **kwargs)
    return function(*args, **kwargs) if made is None else made


def _other_implementation(function: FunctionType) -> str:
    """Name another function that a decorator may call instead; "" if there is none."""
    # A decorator of transformers may hold the function of an installed package.
    plain = inspect.unwrap(function)
    if plain is function:
        return ""
    for cell in function.__closure__ or ():
        held = cell.cell_contents
        if callable(held) and not isinstance(held, type) and held is not plain:
            return f"{held.__module__}.{held.__name__}"
    return ""


def form_of(function: _Function) -> ScanForm | None:
    """Return the form of a function; ``None`` for an unknown one."""
    return _form_by_trials(inspect.unwrap(function))


@once_per_function
def _form_by_trials(plain: _Function) -> ScanForm | None:
    return next((form for form in _forms(plain.__name__) if _computes(plain, form)), None)


_TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.02}
_SIZES = ((2, 5), (1, 1), (1, 130))
"""Rows and tokens. A function might branch on a single row, a single token, or many tokens."""


def _computes(function: _Function, form: ScanForm) -> bool:
    """Return True if results and writes equal those of the op in every trial."""
    # Trials take seconds, so names are compared first.
    names = [name for name in _arguments_in_order(function) if name not in IMPLEMENTATIONS]
    if names != _arguments_in_order(form.call)[1 : len(names) + 1] or _reads_others(function):
        return False
    calls = [*product((torch.float32,), _SIZES), *product(_TOLERANCES, _SIZES[:1])]
    options = form.trials(function)
    return all(
        _agrees(function, form, dtype, chosen, *sizes)
        for (dtype, sizes), chosen in product(calls, options)
    )


def _arguments_in_order(function: _Function) -> list[str]:
    """List the named arguments in order."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _reads_others(function: _Function) -> bool:
    """Return True if a function reads ``*args`` or ``**kwargs``."""
    parameters = inspect.signature(function).parameters.values()
    rest = {p.name for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    return any(instruction.argval in rest for instruction in dis.get_instructions(function))


def _agrees(
    function: _Function,
    form: ScanForm,
    dtype: torch.dtype,
    options: Options,
    batch: int,
    tokens: int,
) -> bool:
    """Return True if one call has the same result and the same writes as the op's definition."""
    # Two draws of the same numbers, as a call may write to its arguments.
    args, kwargs = form.draw(dtype, options, batch, tokens)
    own_args, own_kwargs = form.draw(dtype, options, batch, tokens)
    expected = form.call(form.native(options), *own_args, **own_kwargs)

    try:
        with torch.no_grad():
            result = function(*args, **kwargs)
    except Exception:  # a function of another kind may raise anything
        return False

    if type(result) is not type(expected):
        return False
    if len(_tensors([result])) != len(_tensors([expected])):
        return False

    # States are among the arguments, and both sides may have written to them.
    pairs = zip(_tensors([result, *args]), _tensors([expected, *own_args]), strict=False)
    return all(_close(a, b, _TOLERANCES[dtype]) for a, b in pairs)


def _tensors(values: list[Any]) -> list[Tensor]:
    flat = [each for value in values for each in (value if isinstance(value, tuple) else (value,))]
    return [each for each in flat if isinstance(each, Tensor)]


def _close(result: Tensor, expected: Tensor, tolerance: float) -> bool:
    if (result.shape, result.dtype) != (expected.shape, expected.dtype):
        return False
    # States grow with the number of tokens.
    absolute = tolerance * max(1.0, float(expected.abs().max()))
    return torch.allclose(result, expected, atol=absolute, rtol=tolerance)
