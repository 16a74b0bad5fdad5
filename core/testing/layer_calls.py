"""Small calls of layers without a functional form. No spec has inputs for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from opgraft import ops
from torch import nn

_SIZE = 32
"""Elements of each last dimension."""

_TOKENS = 4

Built = tuple[nn.Module, tuple[Any, ...]]
"""A layer, and the positional arguments of a call."""


def _example_rows() -> torch.Tensor:
    return torch.ones(_TOKENS, _SIZE)


def _of_sizes(layer: Any) -> Callable[[], Built]:
    return lambda: (layer(_SIZE, _SIZE), (_example_rows(),))


def _linear() -> nn.Module:
    return ops.Linear(_SIZE, _SIZE)


def _embedding() -> Built:
    return ops.VocabParallelEmbedding(_SIZE, _SIZE), (torch.arange(_TOKENS),)


def _linear_act() -> Built:
    return ops.LinearAct(_linear(), nn.GELU()), (_example_rows(),)


def _mlp() -> Built:
    return ops.MLP(_linear(), nn.GELU(), _linear()), (_example_rows(),)


def _linear_add_norm() -> Built:
    return ops.LinearAddNorm(_linear(), ops.LayerNorm(_SIZE)), (_example_rows(), _example_rows())


def _experts() -> Built:
    chosen = torch.zeros(_TOKENS, 1, dtype=torch.int64)
    return ops.Experts(2, _SIZE, _SIZE), (_example_rows(), chosen, torch.ones(_TOKENS, 1))


def _parts(layer: Any) -> Callable[[], Built]:
    return lambda: (layer(_SIZE, [_SIZE, _SIZE]), (_example_rows(),))


def _heads() -> Built:
    return ops.QKVParallelLinear(_SIZE, _SIZE // 2, 2), (_example_rows(),)


def _logits() -> Built:
    head = ops.ParallelLMHead(_SIZE, _SIZE)
    return ops.LogitsProcessor(_SIZE), (head, _example_rows())


def _unscaled_norm() -> Built:
    return ops.UnscaledRMSNorm(), (_example_rows(),)


LAYERS: Mapping[type, Callable[[], Built]] = MappingProxyType(
    {
        ops.ReplicatedLinear: _of_sizes(ops.ReplicatedLinear),
        ops.ColumnParallelLinear: _of_sizes(ops.ColumnParallelLinear),
        ops.RowParallelLinear: _of_sizes(ops.RowParallelLinear),
        ops.MergedColumnParallelLinear: _parts(ops.MergedColumnParallelLinear),
        ops.QKVParallelLinear: _heads,
        ops.TransposedLinear: _of_sizes(ops.TransposedLinear),
        ops.GatedMLP: _of_sizes(ops.GatedMLP),
        ops.LinearAct: _linear_act,
        ops.MLP: _mlp,
        ops.LinearAddNorm: _linear_add_norm,
        ops.Experts: _experts,
        ops.VocabParallelEmbedding: _embedding,
        ops.LogitsProcessor: _logits,
        ops.UnscaledRMSNorm: _unscaled_norm,
    }
)
"""Functions to build a layer and the input, by the class of the layer."""


def call_of(
    target: type, device: str, dtype: torch.dtype = torch.float32
) -> Callable[[], object] | None:
    """Return a function to build and call a layer; ``None`` for a class without a row."""
    build = LAYERS.get(target)
    if build is None:
        return None

    def call() -> object:
        # Layers and the inputs above take the default dtype.
        former = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                layer, inputs = build()
        finally:
            torch.set_default_dtype(former)
        for parameter in layer.parameters():
            # The weights of engine layers are not initialised. With this value, a sum over a row
            # of ones is 1, in any dtype.
            parameter.data.fill_(1 / _SIZE)
        return layer(*inputs)

    return call
