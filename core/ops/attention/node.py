"""An attention layer as one node of a compiled graph: what it reads of the batch is looked up when it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.errors import LayerError
from torch import Tensor, fx

Layers = Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]]
"""Attention layers by their prefixes."""

_NODES: ContextVar[AttentionNodes | None] = ContextVar("opgraft_attention_nodes", default=None)


@PluggableClass.register("attention_nodes")
class AttentionNodes(PluggableClass):
    """Computes the attention layers that compiled graphs have as nodes; here by calling the layers, which are Python.

    A replacement may have an op that finds layers and batch by itself.

    Args:
        layers: see ``Layers``.
    """

    def __init__(self, layers: Layers) -> None:
        self.layers = layers

    @property
    def op(self) -> Any:
        """The op of the nodes, with the arguments of ``opgraft::attend_layer``, that a compiled graph calls."""
        return torch.ops.opgraft.attend_layer.default

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Have the nodes of a graph that is called within the block compute these layers, for the current batch."""
        token = _NODES.set(self)
        try:
            yield
        finally:
            _NODES.reset(token)


def op_of_node(node: fx.Node) -> Any:
    """Return the op that a node for an attention layer is to call, ``None`` for any other node."""
    nodes = _NODES.get()
    return (
        nodes.op
        if nodes is not None and node.target is torch.ops.opgraft.attend_layer.default
        else None
    )


def as_node(
    query: Tensor, key: Tensor, value: Tensor, prefix: str, width: int | None = None
) -> Tensor:
    """Attend by the layer of that prefix, in a graph as one node.

    Args:
        query: with the next two, what the layer is called with.
        key: see ``query``.
        value: see ``query``.
        prefix: of the layer.
        width: the last dimension of the result; that of ``query`` if not given.

    Returns:
        What the layer does, contiguous: of the shape of ``query`` but for the width.

    Raises:
        LayerError: when it runs and there is no such layer.
    """
    attended: Tensor = torch.ops.opgraft.attend_layer(query, key, value, prefix, width)
    return attended


def _attend_layer(
    query: Tensor, key: Tensor, value: Tensor, prefix: str, width: int | None
) -> Tensor:
    nodes = _NODES.get()
    layer = None if nodes is None else nodes.layers.get(prefix)
    if layer is None:
        raise LayerError(
            f"a compiled graph has the attention layer {prefix!r} as a node, and none of that prefix is given: call "
            "the graph within AttentionNodes(attention_layers(model)).entered()"
        )
    return layer(query, key, value).contiguous()


def _faked(query: Tensor, key: Tensor, value: Tensor, prefix: str, width: int | None) -> Tensor:
    return query.new_empty((*query.shape[:-1], query.shape[-1] if width is None else width))


_UNRECORDABLE = getattr(torch.Tag, "cudagraph_unsafe", torch.Tag.data_dependent_output)
"""No static graph has the op: a recording would read the batch of the step in which it was made."""

torch.library.define(
    "opgraft::attend_layer",
    "(Tensor query, Tensor key, Tensor value, str prefix, SymInt? width) -> Tensor",
    tags=(_UNRECORDABLE,),
)
torch.library.impl("opgraft::attend_layer", "default", _attend_layer)
torch.library.register_fake("opgraft::attend_layer", _faked)
