"""Recognises RMS norms that take a gate beside their input, as state-space models have them.

Such forwards take shapes apart and look into groups, which symbolic tracing cannot follow. So module and op are both
traced with tensors of one shape, down to torch's own operations, and the two graphs are compared as expressions.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

import torch
from opgraft.adapter import LeaveAlone
from opgraft.grafting.expressions import METHODS, Expression, NotExpressible, constants_of, product_form
from opgraft.grafting.interface import check_interface
from opgraft.ops.layernorm.functional import rms_norm_gated
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

_ROWS = (2, 3)


def gated_norm(dtype: torch.dtype | None, module: nn.Module) -> Mapping[str, Any] | None:
    """The arguments for ``RMSNormGated`` if a module computes it, in a model whose activations have the ``dtype``."""
    arguments = _arguments(module)
    expression = _expression(module, True) if arguments else None
    if expression is None:
        return None
    ungated = _expression(module, False) if arguments[1].default is None else None
    size = len(module.get_parameter("weight"))
    for eps, group_size, before, activation in _settings(expression, size):
        if _form(size, eps, group_size, before, activation, True) != expression:
            continue
        if ungated is not None and _form(size, eps, group_size, before, activation, False) != ungated:
            continue
        check_interface(type(module))
        _check_dtype(module, dtype)
        settings = {"group_size": group_size, "norm_before_gate": before, "activation": activation}
        return {"hidden_size": size, "eps": eps, **settings}
    return None


def _arguments(module: nn.Module) -> list[inspect.Parameter]:
    """The arguments of a forward that takes an input and a gate, if the module has one weight and nothing else."""
    weight = module._parameters.get("weight")
    tensors = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
    if weight is None or len(tensors) != 1 or module._modules or weight.dim() != 1 or len(weight) == 1:
        return []
    arguments = list(inspect.signature(type(module).forward).parameters.values())[1:]
    if len(arguments) != 2 or any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in arguments):
        return []
    first, second = (p.default for p in arguments)
    return arguments if first is inspect.Parameter.empty and second in (None, inspect.Parameter.empty) else []


def _settings(expression: Expression, size: int) -> Iterator[tuple[float, int | None, bool, str]]:
    epsilons = dict.fromkeys(c for c in constants_of(expression) if 0 < c < 1)
    groups = [None, *dict.fromkeys(shape[-1] for shape in _views(expression) if size % shape[-1] == 0)]
    yield from product(epsilons, groups, (False, True), ("silu", "sigmoid"))


def _views(expression: Expression) -> Iterator[tuple[int, ...]]:
    if isinstance(expression, tuple):
        if expression[0] == "view":
            yield expression[1]
        for part in expression:
            yield from _views(part)


def _expression(module: nn.Module, gated: bool) -> Expression | None:
    """The expression of a forward with or without a gate; ``None`` if it has none, or another one in training."""
    size, found = len(module.get_parameter("weight")), []
    for training in (False, True):
        twin = copy.copy(module)  # what tracing sets on the module stays off the model
        twin.__dict__["training"] = training
        try:
            found.append(_traced(functools.partial(_called, twin), size, gated))
        except Exception:  # that it has no expression, or whatever code of the model's author raises when it is traced
            return None
    return found[0] if found[0] == found[1] else None


def _called(module: nn.Module, x: Tensor, weight: Tensor, *gate: Tensor) -> Tensor:
    out: Tensor = functional_call(module, {"weight": weight}, (x, *gate))
    return out


@functools.lru_cache(maxsize=256)
def _form(size: int, eps: float, group_size: int | None, before: bool, activation: str, gated: bool) -> Expression:
    def form(x: Tensor, weight: Tensor, *gate: Tensor) -> Tensor:
        z = gate[0] if gate else None
        return rms_norm_gated.native(x, weight, z, eps, group_size, before, activation)

    return _traced(form, size, gated)


def _traced(function: Callable[..., Tensor], size: int, gated: bool) -> Expression:
    """The expression of a function of an input, a weight and perhaps a gate, on rows of that size in float32."""
    x, gate = torch.zeros(*_ROWS, size), torch.zeros(*_ROWS, size)
    inputs = (x, torch.zeros(size), *([gate] if gated else []))
    graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    symbols = iter(("x", "weight", "gate"))
    values: dict[fx.Node, Expression] = {}
    for node in graph.nodes:
        if node.op == "output":
            return fx.node.map_arg(node.args[0], values.__getitem__)
        values[node] = next(symbols) if node.op == "placeholder" else _value(node, values)
    raise NotExpressible("it returns nothing")


def _value(node: fx.Node, values: dict[fx.Node, Expression]) -> Expression:
    name = node.target.overloadpacket.__name__  # type: ignore[union-attr]
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    if name in ("view", "_unsafe_view"):
        source: Any = node.args[0]
        return _view(args[0], tuple(source.meta["val"].shape), tuple(node.meta["val"].shape))
    if name not in METHODS:
        raise NotExpressible(f"it uses {name}")
    return METHODS[name](*args, **kwargs)


def _view(a: Expression, former: tuple[int, ...], shape: tuple[int, ...]) -> Expression:
    """A view of an expression. On a product of elements and what groups have in common, a view back undoes others."""
    if shape == former:
        return a
    if len(shape) > len(former):
        return ("view", shape, a)
    factors = [a] if a[0] == "view" else [base for base, exponent in a[2] if exponent == 1 and base[0] == "view"]
    if a[0] not in ("view", "product"):
        return ("view", shape, a)
    rest = METHODS["mul"](a, product_form(*(METHODS["pow"](factor, -1) for factor in factors))) if factors else a
    return product_form(rest, *(factor[2] for factor in factors))


def _check_dtype(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Raise ``LeaveAlone`` if the norm would return another dtype than its input's, which the op returns."""
    weight = module.get_parameter("weight")
    for given in {dtype or weight.dtype, weight.dtype}:
        x = torch.empty(*_ROWS, len(weight), dtype=given, device="meta")
        parameters = {"weight": torch.empty_like(weight, device="meta")}
        with torch.no_grad():
            returned = functional_call(copy.copy(module), parameters, (x, x)).dtype
        if returned != given:
            raise LeaveAlone(f"with a weight of {weight.dtype} it makes {returned} of {given}, the op {given}")
