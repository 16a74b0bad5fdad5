"""An attention layer as one node of a compiled graph. A node looks the batch up when it runs."""

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
    """Computes the nodes of compiled graphs for attention layers, by a call of the layer.

    A replacement may bring an op without Python, with its own way to find layers and batch.

    Args:
        layers: see ``Layers``.
    """

    def __init__(self, layers: Layers) -> None:
        self.layers = layers

    @property
    def op(self) -> Any:
        """The op of the nodes; the arguments are those of ``opgraft::attend_layer``."""
        return torch.ops.opgraft.attend_layer.default

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within the block, compute the nodes of a called graph with these layers."""
        token = _NODES.set(self)
        try:
            yield
        finally:
            _NODES.reset(token)


def op_of_node(node: fx.Node) -> Any:
    """Return the op for the node of an attention layer; ``None`` for any other node."""
    if node.target is not torch.ops.opgraft.attend_layer.default:
        return None
    nodes = _NODES.get()
    return None if nodes is None else nodes.op


def as_node(
    query: Tensor, key: Tensor, value: Tensor, prefix: str, width: int | None = None
) -> Tensor:
    """Attend by the layer with a prefix; in a graph, the call is one node.

    Args:
        query: the first argument of the layer.
        key: the second.
        value: the third.
        prefix: the prefix of the layer.
        width: the last dimension of the result; that of ``query`` by default.

    Returns:
        The result of the layer, contiguous: of the shape of ``query`` but for the width.

    Raises:
        LayerError: no layer has the prefix when the node runs.
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
            f"a compiled graph has the attention layer {prefix!r} as a node, and none of that "
            "prefix is given: call the graph within "
            "AttentionNodes(attention_layers(model)).entered()"
        )
    return layer(query, key, value).contiguous()


def _fake_attend_layer(
    query: Tensor, key: Tensor, value: Tensor, prefix: str, width: int | None
) -> Tensor:
    last = query.shape[-1] if width is None else width
    return query.new_empty((*query.shape[:-1], last))


_UNRECORDABLE = getattr(torch.Tag, "cudagraph_unsafe", torch.Tag.data_dependent_output)
"""Keeps the op out of static graphs: a recording would read the batch of its own step forever."""

torch.library.define(
    "opgraft::attend_layer",
    "(Tensor query, Tensor key, Tensor value, str prefix, SymInt? width) -> Tensor",
    tags=(_UNRECORDABLE,),
)
torch.library.impl("opgraft::attend_layer", "default", _attend_layer)
torch.library.register_fake("opgraft::attend_layer", _fake_attend_layer)
