"""An attention layer as one node of a compiled graph: what it reads of the batch is looked up when it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType

import torch
from opgraft.errors import LayerError
from torch import Tensor

Layers = Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]]
"""Attention layers by their prefixes."""

_LAYERS: ContextVar[Layers] = ContextVar("opgraft_attention_layers", default=MappingProxyType({}))


@contextmanager
def nodes_of(layers: Layers) -> Iterator[None]:
    """Have the nodes of a graph that is called within the block compute these layers."""
    token = _LAYERS.set(layers)
    try:
        yield
    finally:
        _LAYERS.reset(token)


def as_node(query: Tensor, key: Tensor, value: Tensor, prefix: str, width: int | None = None) -> Tensor:
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


def _attend_layer(query: Tensor, key: Tensor, value: Tensor, prefix: str, width: int | None) -> Tensor:
    layer = _LAYERS.get().get(prefix)
    if layer is None:
        raise LayerError(
            f"a compiled graph has the attention layer {prefix!r} as a node, and none of that prefix is given: call "
            "the graph within nodes_of(attention_layers(model))"
        )
    return layer(query, key, value).contiguous()


def _faked(query: Tensor, key: Tensor, value: Tensor, prefix: str, width: int | None) -> Tensor:
    return query.new_empty((*query.shape[:-1], query.shape[-1] if width is None else width))


torch.library.define(
    "opgraft::attend_layer", "(Tensor query, Tensor key, Tensor value, str prefix, SymInt? width) -> Tensor"
)
torch.library.impl("opgraft::attend_layer", "default", _attend_layer)
torch.library.register_fake("opgraft::attend_layer", _faked)
