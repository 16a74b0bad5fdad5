"""The built-in rows for modules that combine linear layers with an activation, a residual or a
norm.

Such a module is recognised by the calls in the forward, whatever names the children have. The
children are planned first, so recognised children are ops by then, and the composite receives the
ops.
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

_MOST_CHILDREN = 6  # every order of three children is tried


def composite_adapters() -> tuple[Adapter, ...]:
    """Return the rows. The rows keep traces: use the rows for one walk over a model."""
    composites = _Composites()
    return (
        Adapter("gated MLP", GatedMLP, composites.gated_mlp),
        Adapter("MLP", MLP, composites.mlp),
        Adapter("linear, activation", LinearAct, composites.linear_act),
        Adapter("linear, residual, norm", LinearAddNorm, composites.linear_add_norm),
    )


class _Composites:
    """Recognises modules by an expression over the children. Each module is traced once."""

    def __init__(self) -> None:
        self._seen: dict[nn.Module, Expression | None] = {}

    def gated_mlp(self, module: nn.Module) -> Mapping[str, Any] | None:
        expression = self._expression(module)
        if expression is None:
            return None
        for gate, up, down in permutations(_layers(module), 3):
            upward = child_form(up, "x")
            for activation, act, gated in _activations(module, child_form(gate, "x")):
                if expression == child_form(down, product_form(gated, upward)):
                    return _gated_mlp_arguments(module, (gate, up, down), activation, act)
        return None

    def mlp(self, module: nn.Module) -> Mapping[str, Any] | None:
        expression = self._expression(module)
        for up, down in permutations(_linear_ops(module), 2):
            for act, activated in _activation_children(module, child_form(up, "x")):
                if expression == child_form(down, activated):
                    return _children_by_part(module, {"up": up, "act": act, "down": down})
        return None

    def linear_act(self, module: nn.Module) -> Mapping[str, Any] | None:
        expression = self._expression(module)
        for linear in _linear_ops(module):
            for act, activated in _activation_children(module, child_form(linear, "x")):
                if expression == activated:
                    return _children_by_part(module, {"linear": linear, "act": act})
        return None

    def linear_add_norm(self, module: nn.Module) -> Mapping[str, Any] | None:
        expression = self._expression(module)
        arguments = arguments_of(module)
        if expression is None or len(arguments) != 2:
            return None

        # The first argument goes through the linear layer.
        residual = arguments[1]
        children = dict(module.named_children())
        dropouts = [name for name, child in children.items() if type(child) is nn.Dropout]

        for linear, norm in product(_linear_ops(module), children):
            mapped = child_form(linear, "x")
            for dropout in (None, *dropouts):
                dropped = mapped if dropout is None else child_form(dropout, mapped)
                if expression != child_form(norm, sum_form(dropped, residual)):
                    continue
                parts = _children_by_part(module, {"linear": linear, "norm": norm})
                names = (linear, norm, dropout or "dropout")
                child = None if dropout is None else children[dropout]
                return {**parts, "dropout": child, "names": names}

        return None

    def _expression(self, module: nn.Module) -> Expression | None:
        if module not in self._seen:
            self._seen[module] = _attempt(module)
        return self._seen[module]


def _children_by_part(module: nn.Module, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the children by parts of a composite, and the names of the children in order."""
    check_interface(type(module))
    children = {part: getattr(module, name) for part, name in names.items()}
    return {**children, "names": tuple(names.values())}


def _gated_mlp_arguments(
    module: nn.Module, names: tuple[str, str, str], activation: str, act: str | None
) -> Mapping[str, Any] | None:
    check_interface(type(module))
    gate, up, down = (_linear_child(module, name) for name in names)
    # One call computes gate and up, so both need the same form.
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
    except Exception:  # code of the model's author may raise anything
        return None


def _is_candidate(module: nn.Module) -> bool:
    """Return True if a module has few children, a linear op among them, and no tensors."""
    if type(module).__module__.startswith("torch."):
        return False

    # No composite has tensors of its own.
    tensors = (*module._parameters.values(), *module._buffers.values())
    if any(tensor is not None for tensor in tensors):
        return False

    children = list(module.children())
    if len(children) > _MOST_CHILDREN:
        return False

    has_linear_op = any(isinstance(child, Linear) for child in children)
    return has_linear_op and len(arguments_of(module)) in (1, 2)


def arguments_of(module: nn.Module) -> list[str]:
    """Return the names of a forward's arguments; none if one has a default or is special."""
    # Callers do not pass self.
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    plain = all(p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in parameters)
    return [p.name for p in parameters] if plain else []


def _layers(module: nn.Module) -> list[str]:
    """Return the linear ops among the children, and children other than ops.

    Other code may have put a layer of its own in the place of a linear layer.
    """
    return [
        name
        for name, child in module.named_children()
        if isinstance(child, Linear) or not isinstance(child, CustomOp)
    ]


def _linear_ops(module: nn.Module) -> list[str]:
    return [name for name, child in module.named_children() if isinstance(child, Linear)]


def _linear_child(module: nn.Module, name: str) -> Linear:
    child = module.get_submodule(name)
    if not isinstance(child, Linear):
        raise LeaveAlone(f"its {name} is still a {type(child).__name__}")
    return child


def _activations(
    module: nn.Module, argument: Expression
) -> Iterator[tuple[str, str | None, Expression]]:
    """Yield each activation of an argument: the name, the child if there is one, and the form."""
    for activation, form in activated_form(argument).items():
        yield activation, None, form
    for name, form in _activation_children(module, argument):
        yield epilogue_of(getattr(module, name)) or "", name, form


def _activation_children(
    module: nn.Module, argument: Expression
) -> Iterator[tuple[str, Expression]]:
    """Yield the name of each activation child, and the form of the child's result."""
    for name, child in module.named_children():
        if epilogue_of(child) is not None:
            yield name, child_form(name, argument)
