"""Recognises RMS norms that take a gate beside their input, as state-space models have them."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import torch
from opgraft.grafting.expressions import Expression, constants_of
from opgraft.grafting.interface import check_interface
from opgraft.grafting.traced import SHAPES, USUAL, Shape, refuses, traced_function, traced_module
from opgraft.ops.layernorm.functional import rms_norm_gated
from opgraft.registry.adapter import LeaveAlone
from torch import Tensor, nn
from torch.func import functional_call


def gated_norm(dtype: torch.dtype | None, module: nn.Module) -> Mapping[str, Any] | None:
    """Give the arguments for ``RMSNormGated`` if a module computes it, in a model with activations of the ``dtype``."""
    arguments = _arguments(module)
    if not arguments:
        return None
    size = len(module.get_parameter("weight"))
    calls = [
        (rows, gated)
        for rows in SHAPES
        for gated in (True, False)
        if gated or arguments[1].default is None
    ]
    first = traced_module(module, ("weight",), *_inputs(size, *calls[0]))
    if first is None:
        return None
    found = {
        call: traced_module(module, ("weight",), *_inputs(size, *call)) for call in calls[1:]
    } | {calls[0]: first}
    for call in [call for call, expression in found.items() if expression is None]:
        if not refuses(module, ("weight",), *_inputs(size, *call)):
            return None
        del found[call]
    for settings in _settings(first, size):
        if all(expression == _form(size, call, *settings) for call, expression in found.items()):
            check_interface(type(module))
            _check_dtype(module, dtype)
            names = ("eps", "group_size", "norm_before_gate", "activation")
            return {"hidden_size": size, **dict(zip(names, settings, strict=True))}
    return None


def _arguments(module: nn.Module) -> list[inspect.Parameter]:
    """Return the arguments of a forward that takes an input and a gate, if the module has one weight only."""
    weight = module._parameters.get("weight")
    tensors = [
        t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None
    ]
    if (
        weight is None
        or len(tensors) != 1
        or module._modules
        or weight.dim() != 1
        or len(weight) == 1
    ):
        return []
    arguments = list(inspect.signature(type(module).forward).parameters.values())[1:]
    if len(arguments) != 2 or any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in arguments):
        return []
    first, second = (p.default for p in arguments)
    return (
        arguments
        if first is inspect.Parameter.empty and second in (None, inspect.Parameter.empty)
        else []
    )


def _inputs(size: int, rows: Shape, gated: bool) -> list[Shape]:
    return [(*rows, size)] * (1 + gated)


def _settings(expression: Expression, size: int) -> Iterator[tuple[float, int | None, bool, str]]:
    """Yield every eps, group size, place of the gate and activation that the expression may have."""
    epsilons = dict.fromkeys(c for c in constants_of(expression) if 0 < c < 1)
    groups = [
        None,
        *dict.fromkeys(shape[-1] for shape in _views(expression) if size % shape[-1] == 0),
    ]
    yield from product(epsilons, groups, (False, True), ("silu", "sigmoid"))


def _views(expression: Expression) -> Iterator[tuple[int, ...]]:
    if isinstance(expression, tuple):
        if expression[:1] == ("view",):
            yield expression[1]
        for part in expression:
            yield from _views(part)


@functools.lru_cache(maxsize=256)
def _form(
    size: int,
    call: tuple[Shape, bool],
    eps: float,
    group_size: int | None,
    before: bool,
    activation: str,
) -> Expression:
    def form(parameters: Mapping[str, Tensor], x: Tensor, z: Tensor | None = None) -> Tensor:
        return rms_norm_gated.native(
            x, parameters["weight"], z, eps, group_size, before, activation
        )

    return traced_function(form, {"weight": (size,)}, *_inputs(size, *call))


def _check_dtype(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Raise ``LeaveAlone`` if the norm would return another dtype than its input's, which the op returns."""
    weight = module.get_parameter("weight")
    for given in dict.fromkeys((dtype or weight.dtype, weight.dtype)):
        x = torch.empty(*USUAL, len(weight), dtype=given, device="meta")
        parameters = {"weight": torch.empty_like(weight, device="meta")}
        with torch.no_grad():
            returned = functional_call(copy.copy(module), parameters, (x, x)).dtype
        if returned != given:
            raise LeaveAlone(
                f"with a weight of {weight.dtype} it makes {returned} of {given}, the op {given}"
            )
