"""The built-in rows for modules that combine linear layers with an activation, a residual or a norm.

They are recognised by what their forward makes of their children, whatever the children are called. By then the
children are ops themselves, where adapters recognised them, and the composite takes them over.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from itertools import permutations, product
from typing import Any

from opgraft.binding.custom_op import CustomOp
from opgraft.grafting.expressions import (
    Expression,
    activated_form,
    child_form,
    composition_of,
    product_form,
    sum_form,
)
from opgraft.grafting.interface import check_interface
from opgraft.ops import MLP, GatedMLP, Linear, LinearAct, LinearAddNorm
from opgraft.ops.composites.composite import epilogue_of
from opgraft.registry.adapter import Adapter, LeaveAlone
from torch import nn

_MOST_CHILDREN = 6  # all orders of three of them are tried


def composite_adapters() -> tuple[Adapter, ...]:
    """Return the rows, which remember what they traced: use them for one walk over a model."""
    composites = _Composites()
    return (
        Adapter("gated MLP", GatedMLP, composites.gated_mlp),
        Adapter("MLP", MLP, composites.mlp),
        Adapter("linear, activation", LinearAct, composites.linear_act),
        Adapter("linear, residual, norm", LinearAddNorm, composites.linear_add_norm),
    )


class _Composites:
    """Recognises modules by what they make of their children; each is traced once."""

    def __init__(self) -> None:
        self._seen: dict[nn.Module, Expression | None] = {}

    def gated_mlp(self, module: nn.Module) -> Mapping[str, Any] | None:
        expression = self._expression(module)
        if expression is None:
            return None
        for gate, up, down in permutations(_layers(module), 3):
            for activation, act, gated in _activations(module, child_form(gate, "x")):
                if expression == child_form(down, product_form(gated, child_form(up, "x"))):
                    return _gated_mlp_arguments(module, (gate, up, down), activation, act)
        return None

    def mlp(self, module: nn.Module) -> Mapping[str, Any] | None:
        expression = self._expression(module)
        for up, down in permutations(_linear_ops(module), 2):
            for act, activated in _activation_children(module, child_form(up, "x")):
                if expression == child_form(down, activated):
                    check_interface(type(module))
                    layers = {
                        "up": getattr(module, up),
                        "act": getattr(module, act),
                        "down": getattr(module, down),
                    }
                    return {**layers, "names": (up, act, down)}
        return None

    def linear_act(self, module: nn.Module) -> Mapping[str, Any] | None:
        expression = self._expression(module)
        for linear in _linear_ops(module):
            for act, activated in _activation_children(module, child_form(linear, "x")):
                if expression == activated:
                    check_interface(type(module))
                    layers = {"linear": getattr(module, linear), "act": getattr(module, act)}
                    return {**layers, "names": (linear, act)}
        return None

    def linear_add_norm(self, module: nn.Module) -> Mapping[str, Any] | None:
        expression = self._expression(module)
        if expression is None or len(arguments_of(module)) != 2:
            return None
        residual = arguments_of(module)[1]
        dropouts = [name for name, child in module.named_children() if type(child) is nn.Dropout]
        for linear, norm in product(_linear_ops(module), dict(module.named_children())):
            for dropout in (None, *dropouts):
                mapped = child_form(linear, "x")
                mapped = mapped if dropout is None else child_form(dropout, mapped)
                if expression == child_form(norm, sum_form(mapped, residual)):
                    check_interface(type(module))
                    layers = {"linear": getattr(module, linear), "norm": getattr(module, norm)}
                    names = (linear, norm, dropout or "dropout")
                    return {
                        **layers,
                        "dropout": dropout and getattr(module, dropout),
                        "names": names,
                    }
        return None

    def _expression(self, module: nn.Module) -> Expression | None:
        if module not in self._seen:
            self._seen[module] = _attempt(module)
        return self._seen[module]


def _gated_mlp_arguments(
    module: nn.Module, names: tuple[str, str, str], activation: str, act: str | None
) -> Mapping[str, Any] | None:
    check_interface(type(module))
    gate, up, down = (_linear(module, name) for name in names)
    if (gate.bias is None) != (up.bias is None):
        raise LeaveAlone(f"one of {names[0]} and {names[1]} has a bias, the other has none")
    if gate.weight.shape != up.weight.shape or down.weight.shape != gate.weight.shape[::-1]:
        raise LeaveAlone(f"the sizes of {', '.join(names)} are not those of one gated MLP")
    intermediate_size, hidden_size = gate.weight.shape
    return {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "activation": activation,
        "bias": gate.bias is not None,
        "down_bias": down.bias is not None,
        "names": names if act is None else (*names, act),
        "act": act and getattr(module, act),
    }


def _attempt(module: nn.Module) -> Expression | None:
    if not _is_candidate(module):
        return None
    try:
        return composition_of(module)
    except (
        Exception
    ):  # that it is no composite, or whatever code of the model's author raises when it is traced
        return None


def _is_candidate(module: nn.Module) -> bool:
    """Tell whether a module is small enough, and plain enough in what it takes, for its forward to be traced."""
    children = list(module.children())
    tensors = [
        t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None
    ]
    if (
        type(module).__module__.startswith("torch.")
        or tensors
        or not 0 < len(children) <= _MOST_CHILDREN
    ):
        return False
    return len(arguments_of(module)) in (1, 2) and any(
        isinstance(child, Linear) for child in children
    )


def arguments_of(module: nn.Module) -> list[str]:
    """Return the names of a forward's arguments; none if it takes any but plain ones without defaults."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    plain = all(p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in parameters)
    return [p.name for p in parameters] if plain else []


def _layers(module: nn.Module) -> list[str]:
    """Return the children that are linear ops, or may be what other code put in the place of linear layers."""
    return [
        name
        for name, child in module.named_children()
        if isinstance(child, Linear) or not isinstance(child, CustomOp)
    ]


def _linear_ops(module: nn.Module) -> list[str]:
    return [name for name, child in module.named_children() if isinstance(child, Linear)]


def _linear(module: nn.Module, name: str) -> Linear:
    child = module.get_submodule(name)
    if not isinstance(child, Linear):
        raise LeaveAlone(f"its {name} stayed what it was, a {type(child).__name__}")
    return child


def _activations(
    module: nn.Module, argument: Expression
) -> Iterator[tuple[str, str | None, Expression]]:
    """Yield each activation of an argument: what it is, by which child if it is one, and its form."""
    for activation, form in activated_form(argument).items():
        yield activation, None, form
    for name, form in _activation_children(module, argument):
        yield epilogue_of(getattr(module, name)) or "", name, form


def _activation_children(
    module: nn.Module, argument: Expression
) -> Iterator[tuple[str, Expression]]:
    """Yield the form that each child that is an activation makes of an argument, with the name of the child."""
    for name, child in module.named_children():
        if epilogue_of(child) is not None:
            yield name, child_form(name, argument)
