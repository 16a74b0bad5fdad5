"""Recognise RMS norms with a gate beside the input, such as those of state-space models."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from opgraft.grafting.expressions import Expression, constants_of
from opgraft.grafting.interface import check_interface
from opgraft.grafting.traced import SHAPES, USUAL, Shape, refuses, traced_function, traced_module
from opgraft.ops.layernorm.functional import rms_norm_gated
from opgraft.registry.adapter import LeaveAlone
from torch import Tensor, nn
from torch.func import functional_call

_PARAMETERS = ("weight",)


class _Call(NamedTuple):
    """One call of a norm: the input's shape before the last dimension, and the use of a gate."""

    rows: Shape
    gated: bool

    def inputs(self, size: int) -> list[Shape]:
        """Return the shapes of the input and, if there is one, of the gate."""
        return [(*self.rows, size)] * (2 if self.gated else 1)


class _Settings(NamedTuple):
    """The settings of ``RMSNormGated`` beside the size."""

    eps: float
    group_size: int | None
    norm_before_gate: bool
    activation: str


def gated_norm(dtype: torch.dtype | None, module: nn.Module) -> Mapping[str, Any] | None:
    """Return the arguments for ``RMSNormGated`` if a module computes the same, else ``None``.

    Args:
        dtype: of the activations in the model.
        module: to recognise.
    """
    arguments = _arguments(module)
    if not arguments:
        return None

    size = len(module.get_parameter("weight"))
    usual, *others = _calls(gate_is_optional=arguments[1].default is None)
    # Every norm takes the first shape, which rules most modules and settings out.
    first = traced_module(module, _PARAMETERS, *usual.inputs(size))
    if first is None:
        return None
    # The constants and views of one call name all candidates.
    fitting = [each for each in _candidates(first, size) if first == _form(size, usual, each)]
    if not fitting:
        return None
    expressions = _expressions(module, size, others)
    if expressions is None:
        return None

    for settings in fitting:
        if all(expressions[call] == _form(size, call, settings) for call in expressions):
            check_interface(type(module))
            _check_dtype(module, dtype)
            return {"hidden_size": size, **settings._asdict()}

    return None


def _calls(gate_is_optional: bool) -> list[_Call]:
    """Return every possible call of a module, the usual one first."""
    uses_of_gate = (True, False) if gate_is_optional else (True,)
    return [_Call(rows, gated) for rows, gated in product(SHAPES, uses_of_gate)]


def _expressions(
    module: nn.Module, size: int, calls: Sequence[_Call]
) -> dict[_Call, Expression] | None:
    """Trace calls of a module, except those that it refuses.

    ``None`` if another call has no expression.
    """
    expressions: dict[_Call, Expression] = {}
    for call in calls:
        inputs = call.inputs(size)
        expression = traced_module(module, _PARAMETERS, *inputs)
        if expression is not None:
            expressions[call] = expression
        elif not refuses(module, _PARAMETERS, *inputs):
            return None

    return expressions


def _arguments(module: nn.Module) -> list[inspect.Parameter]:
    """Return the two arguments of a forward with an input and a gate.

    Empty for other forwards, and for modules with more than one weight.
    """
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 1 or len(weight) == 1 or module._modules:
        return []

    tensors = (*module._parameters.values(), *module._buffers.values())
    if sum(tensor is not None for tensor in tensors) != 1:
        return []

    arguments = list(inspect.signature(type(module).forward).parameters.values())[1:]
    if len(arguments) != 2 or any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in arguments):
        return []

    first, second = (p.default for p in arguments)
    if first is not inspect.Parameter.empty:
        return []

    return arguments if second in (None, inspect.Parameter.empty) else []


def _candidates(expression: Expression, size: int) -> Iterator[_Settings]:
    """Yield all settings of norms that fit an expression."""
    # By order, as a set would make the choice among equal candidates random.
    epsilons = dict.fromkeys(c for c in constants_of(expression) if 0 < c < 1)
    groups = dict.fromkeys(shape[-1] for shape in _views(expression) if size % shape[-1] == 0)
    values = product(epsilons, [None, *groups], (False, True), ("silu", "sigmoid"))
    yield from map(_Settings._make, values)


def _views(expression: Expression) -> Iterator[tuple[int, ...]]:
    """Yield the shape of every view in an expression."""
    if not isinstance(expression, tuple):
        return
    if expression[:1] == ("view",):
        yield expression[1]
    for part in expression:
        yield from _views(part)


@functools.lru_cache(maxsize=256)
def _form(size: int, call: _Call, settings: _Settings) -> Expression:
    def form(parameters: Mapping[str, Tensor], x: Tensor, z: Tensor | None = None) -> Tensor:
        return rms_norm_gated.native(x, parameters["weight"], z, *settings)

    return traced_function(form, {"weight": (size,)}, *call.inputs(size))


def _check_dtype(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Raise ``LeaveAlone`` if the norm returns another dtype than the input's; the op does not."""
    weight = module.get_parameter("weight")
    # The activations of the model, and inputs in the dtype of the weight.
    for given in dict.fromkeys((dtype or weight.dtype, weight.dtype)):
        x = torch.empty(*USUAL, len(weight), dtype=given, device="meta")
        parameters = {"weight": torch.empty_like(weight, device="meta")}
        with torch.no_grad():
            returned = functional_call(copy.copy(module), parameters, (x, x)).dtype
        if returned != given:
            raise LeaveAlone(
                f"with a weight of {weight.dtype} it makes {returned} of {given}, the op {given}"
            )
