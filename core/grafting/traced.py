"""The computation of a module on tensors of given shapes, as an expression.

Some forwards take the shape of their input apart, which symbolic tracing cannot follow. So ``make_fx`` traces them with
tensors of a few shapes, down to torch's own operations, and an op that they may be is traced with the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from opgraft.grafting.expressions import METHODS, Expression, NotExpressible, product_form
from opgraft.grafting.side_effects import changed_attribute, detached, side_effect_of
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

SHAPES = ((2, 3), (2, 1), (6,))
"""Shapes of an input before its last dimension: the usual one, a single token, and no batch."""


def traced_module(module: nn.Module, parameters: tuple[str, ...], *arguments: Tensor) -> Expression | None:
    """Return the expression of a forward; ``None`` if it has none, another one in training, or does more than compute.

    The arguments are ``"argument 0"`` and so on; the parameters, taken as float32, have their names.
    """
    found: list[Expression] = []
    if side_effect_of(module):
        return None
    for training in (False, True):
        twin = detached(module)  # what tracing sets on the module stays off the model
        twin.__dict__["training"] = training
        before = detached(twin)
        shapes = {name: module.get_parameter(name).shape for name in parameters}
        try:
            found.append(traced_function(functools.partial(_call, twin), shapes, *arguments))
        except Exception:  # that it has no expression, or whatever code of the model's author raises when it is traced
            return None
        if changed_attribute(twin, before):
            return None
    return found[0] if found[0] == found[1] else None


def takes(module: nn.Module, parameters: tuple[str, ...], *arguments: Tensor) -> bool:
    """Return whether a forward takes such arguments at all; where it does not, it raises."""
    zeros = {name: torch.zeros(module.get_parameter(name).shape) for name in parameters}
    try:
        with torch.no_grad():
            _call(detached(module), zeros, *arguments)
    except Exception:  # whatever code of the model's author raises
        return False
    return True


def traced_function(
    function: Callable[..., Tensor], shapes: Mapping[str, tuple[int, ...]], *arguments: Tensor
) -> Expression:
    """Return the expression of a function of named parameters, given as a mapping, and of arguments.

    Raises:
        NotExpressible: it uses other operations, or returns no tensor.
    """
    names = [*shapes, *(f"argument {i}" for i in range(len(arguments)))]

    def flat(*tensors: Tensor) -> Tensor:
        return function(dict(zip(shapes, tensors, strict=False)), *tensors[len(shapes) :])

    zeros = [torch.zeros(shape) for shape in shapes.values()]
    graph = make_fx(flat, tracing_mode="fake")(*zeros, *arguments).graph
    values: dict[fx.Node, Expression] = dict(zip(graph.find_nodes(op="placeholder"), names, strict=True))
    for node in graph.nodes:
        if node.op == "output":
            result: Any = node.args[0]
            return tuple(result.meta["val"].shape), values[result]
        if node not in values:
            values[node] = _value(node, values)
    raise NotExpressible("it returns nothing")


def _call(module: nn.Module, parameters: Mapping[str, Tensor], *arguments: Tensor) -> Tensor:
    out: Tensor = functional_call(module, dict(parameters), arguments)
    return out


def _value(node: fx.Node, values: dict[fx.Node, Expression]) -> Expression:
    name = node.target.overloadpacket.__name__  # type: ignore[union-attr]
    args: Any
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    if name in _VIEWS:
        source: Any = node.args[0]
        former, shape = source.meta["val"].shape, node.meta["val"].shape
        if name == "squeeze" and shape[-1:] == former[-1:]:  # over which means are taken
            return args[0]
        return _view(args[0], _grouped(former), _grouped(shape))
    if name in _MATRICES:
        return _MATRICES[name](*args, **kwargs)
    if name not in METHODS:
        raise NotExpressible(f"it uses {name}")
    return METHODS[name](*args, **kwargs)


def _grouped(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without dimensions of one element, but for the last two, which may be groups and their elements."""
    return (*(size for size in shape[:-2] if size != 1), *shape[-2:])


def _view(a: Expression, former: tuple[int, ...], shape: tuple[int, ...]) -> Expression:
    """View an expression. On a product of elements and what groups have in common, a view back undoes others."""
    if shape == former:
        return a
    if len(shape) > len(former) or a[0] not in ("view", "product"):
        return ("view", shape, a)
    factors = [a] if a[0] == "view" else [base for base, exponent in a[2] if exponent == 1 and base[0] == "view"]
    if not factors:
        return ("view", shape, a)
    rest = METHODS["mul"](a, product_form(*(METHODS["pow"](factor, -1) for factor in factors)))
    return product_form(rest, *(factor[2] for factor in factors))


def _transposed(a: Expression) -> Expression:
    return a[1] if a[0] == "t" else ("t", a)


_VIEWS = ("view", "_unsafe_view", "squeeze")
_MATRICES: Mapping[str, Callable[..., Expression]] = {
    "t": _transposed,
    "addmm": lambda bias, a, b: ("addmm", bias, a, b),
}
