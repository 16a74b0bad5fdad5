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


def as_node(query: Tensor, key: Tensor, value: Tensor, prefix: str) -> Tensor:
    """Attend by the layer of that prefix, in a graph as one node.

    Arguments and errors are those of ``Attention.forward``; the result is contiguous.

    Raises:
        LayerError: when it runs and there is no such layer.
    """
    attended: Tensor = torch.ops.opgraft.attend_layer(query, key, value, prefix)
    return attended


def _attend_layer(query: Tensor, key: Tensor, value: Tensor, prefix: str) -> Tensor:
    layer = _LAYERS.get().get(prefix)
    if layer is None:
        raise LayerError(
            f"a compiled graph has the attention layer {prefix!r} as a node, and none of that prefix is given: call "
            "the graph within nodes_of(attention_layers(model))"
        )
    return layer(query, key, value).contiguous()


def _faked(query: Tensor, key: Tensor, value: Tensor, prefix: str) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


torch.library.define("opgraft::attend_layer", "(Tensor query, Tensor key, Tensor value, str prefix) -> Tensor")
torch.library.impl("opgraft::attend_layer", "default", _attend_layer)
torch.library.register_fake("opgraft::attend_layer", _faked)
