"""Nodes of a graph: the forms and arguments of semantic nodes, and the tensors of attributes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from opgraft.binding.functional import FUNCTIONALS, Functional, binding_of
from opgraft.compilation.writes import is_written
from opgraft.registry.decision import Provider
from torch import Tensor, fx

OPERATOR: Any = type(torch.ops.aten.add.Tensor)
"""The class of torch's operators; an instance is one overload, such as ``aten.add.Tensor``."""

PARTS = "opgraft_parts"
"""The key in ``meta`` of a joint tensor's node for the parameters in the joint memory."""

JOINT = "opgraft_joint"
"""The key in ``meta`` of a joint tensor's node for the origin of the tensor, an ``Origin``."""

Origin = tuple[str, ...]
"""The place of a graph's tensor in a model: ``("model", name)``, ``("together", name, *layers)``
for layers with joint weights, ``("packed", layer)``, or ``("value",)`` outside of any model."""

_PREFIX = "opgraft::"


def form_of(node: fx.Node) -> Functional[..., Any] | None:
    """Return the form of a semantic node, ``None`` for any other node."""
    target = node.target
    if not isinstance(target, OPERATOR):
        return None
    name = target.name()
    if not name.startswith(_PREFIX):
        return None
    return FUNCTIONALS.get(name.removeprefix(_PREFIX))


def semantic_call(node: object, *names: str) -> tuple[str, dict[str, Any]] | None:
    """Return the name of a node's form, and the arguments by name with all defaults.

    Returns ``None`` if the node calls none of the named forms, and if another node writes to the
    memory of the arguments or of the result.
    """
    if not isinstance(node, fx.Node):
        return None
    form = form_of(node)
    if form is None or form.name not in names:
        return None
    # After such a write, the same call would have another result elsewhere in the graph.
    if any(is_written(each) for each in (node, *node.all_input_nodes)):
        return None
    bound = inspect.signature(form.native).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return form.name, dict(bound.arguments)


def semantic_calls(graph: fx.Graph, *names: str) -> Iterator[tuple[fx.Node, str, dict[str, Any]]]:
    """Yield each node with a call of one of the named forms, and the answer of ``semantic_call``.

    The caller may change the graph meanwhile.
    """
    for node in list(graph.nodes):
        called = semantic_call(node, *names)
        if called is not None:
            yield node, *called


def has_kernel(name: str) -> bool:
    """Return True if the bound kernel brings a function for the form of that name."""
    return binding_of(FUNCTIONALS[name]).kernel.winner.functional(name) is not None


def may_replace(joined: str, *parts: str) -> bool:
    """Return True if one form in the place of several passes over no provider's kernel.

    A kernel for the joined form may replace kernels for the parts, if one provider brings them all.

    Args:
        joined: the name of the form in the place of the parts.
        *parts: the names of the forms that it replaces.
    """
    providers = {provider_of_kernel(part) for part in parts} - {None}
    return not providers or providers == {provider_of_kernel(joined)}


def provider_of_kernel(name: str) -> Provider | None:
    """Return the provider of the kernel for the form of that name; ``None`` without a kernel."""
    return binding_of(FUNCTIONALS[name]).provider if has_kernel(name) else None


def layout_of(value: Any) -> Any:
    """Describe dtype, device, sizes and strides of a tensor, or of a tuple of tensors.

    Tensors with equal descriptions may stand for each other in a graph.
    """
    if isinstance(value, Tensor):
        # As texts: to compare symbols would fix their values.
        sizes = tuple(map(str, value.shape))
        strides = []
        for size, stride in zip(sizes, value.stride(), strict=True):
            # The stride of a dimension with one element leads nowhere.
            strides.append("any" if size == "1" else str(stride))
        return (value.dtype, str(value.device), sizes, tuple(strides))
    if isinstance(value, (tuple, list)):
        return tuple(layout_of(each) for each in value)
    return str(value)


def attribute_of(module: fx.GraphModule, node: fx.Node) -> Any:
    """Return the tensor of a node ``get_attr``."""
    path, _, name = str(node.target).rpartition(".")
    return getattr(module.get_submodule(path), name)
