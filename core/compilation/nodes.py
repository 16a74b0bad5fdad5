"""Nodes of a graph: the forms that semantic ones call, with what, and the tensors that nodes stand for."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from opgraft.binding.functional import FUNCTIONALS, Functional, binding_of
from opgraft.compilation.writes import is_written
from torch import Tensor, fx

OPERATOR: Any = type(torch.ops.aten.add.Tensor)
"""The class of torch's operators, each for arguments of certain types."""

PARTS = "opgraft_parts"
"""The key in ``meta`` of a node that stands for a joint tensor: the parameters over whose memory it is."""

JOINT = "opgraft_joint"
"""The key in ``meta`` of such a node for where the tensor is from, an ``Origin``."""

Origin = tuple[str, ...]
"""The place of a tensor of a graph in a model: ``("model", name)``, ``("together", name, *layers)`` of
layers with joint weights, ``("packed", layer)``, or ``("value",)`` if no model has the tensor."""

_PREFIX = "opgraft::"


def form_of(node: fx.Node) -> Functional[..., Any] | None:
    """Return the form that a semantic node calls, ``None`` of any other node."""
    target = node.target
    if not isinstance(target, OPERATOR):
        return None
    name = target.name()
    return FUNCTIONALS.get(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else None


def semantic_call(node: object, *names: str) -> tuple[str, dict[str, Any]] | None:
    """Return the name of the form that a node calls, and its arguments by name, defaults too.

    ``None`` for anything but a node that calls one of the named forms, and where somebody writes to the memory of its
    arguments or its result afterwards, as then it computes something else elsewhere in the graph.
    """
    form = form_of(node) if isinstance(node, fx.Node) else None
    if form is None or form.name not in names or not isinstance(node, fx.Node):
        return None
    if any(is_written(each) for each in (node, *node.all_input_nodes)):
        return None
    bound = inspect.signature(form.native).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return form.name, dict(bound.arguments)


def semantic_calls(graph: fx.Graph, *names: str) -> Iterator[tuple[fx.Node, str, dict[str, Any]]]:
    """Yield the nodes that call one of the named forms, as ``semantic_call`` tells; a caller may change the graph."""
    for node in list(graph.nodes):
        called = semantic_call(node, *names)
        if called is not None:
            yield node, *called


def has_kernel(name: str) -> bool:
    """Tell whether a provider's kernel comes as the form of that name here."""
    return binding_of(FUNCTIONALS[name]).kernel.winner.functional(name) is not None


def layout_of(value: Any) -> Any:
    """Describe a tensor, or a tuple of them, as far as a graph rests on it: equal layouts may stand for each other.

    Sizes are compared as they are written, since a comparison of symbols would fix them. The stride of a dimension of
    one element leads nowhere.
    """
    if isinstance(value, Tensor):
        sizes, strides = (tuple(map(str, each)) for each in (value.shape, value.stride()))
        strides = tuple(
            "any" if size == "1" else stride for size, stride in zip(sizes, strides, strict=True)
        )
        return (value.dtype, str(value.device), sizes, strides)
    if isinstance(value, (tuple, list)):
        return tuple(layout_of(each) for each in value)
    return str(value)


def attribute_of(module: fx.GraphModule, node: fx.Node) -> Any:
    """Return the tensor that a node ``get_attr`` stands for."""
    path, _, name = str(node.target).rpartition(".")
    return getattr(module.get_submodule(path), name)
