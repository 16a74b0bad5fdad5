"""Linear layers and output layers: weight methods that multiply by opgraft's kernel."""

from __future__ import annotations

from typing import Any

import opgraft
from opgraft import functional
from torch import Tensor, nn
from vllm.model_executor.layers import linear, vocab_parallel_embedding
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from opgraft_vllm.operators import operator
from opgraft_vllm.replacing import is_taken, note_layer, register
from opgraft_vllm.report import REPORT

PLAIN = {
    linear: (
        "ReplicatedLinear",
        "ColumnParallelLinear",
        "MergedColumnParallelLinear",
        "QKVParallelLinear",
        "RowParallelLinear",
    ),
    vocab_parallel_embedding: ("VocabParallelEmbedding", "ParallelLMHead"),
}
"""The classes of layers by module."""


class _PlainWeight:
    """Keeps the plain weight, instead of packing it as vLLM does, and calls opgraft's kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.multiply: Any = operator(functional.linear)

    def process_weights_after_loading(self, layer: Any) -> None:
        weight = layer.weight
        # Convolutions of state spaces hold their weights in such a layer, and vLLM packs some.
        if weight.is_meta or weight.dim() != 2:
            super().process_weights_after_loading(layer)  # type: ignore[misc]
            return
        # vLLM's own classes of parameters tell opgraft that somebody loads the weight.
        layer.weight = nn.Parameter(weight.data, requires_grad=False)
        opgraft.freeze(layer.weight)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        result: Tensor = self.multiply(x, layer.weight, bias)
        return result


class OpgraftLinear(_PlainWeight, linear.UnquantizedLinearMethod):  # type: ignore[misc]
    """The weight method of linear layers."""


class OpgraftEmbedding(_PlainWeight, UnquantizedEmbeddingMethod):  # type: ignore[misc]
    """The weight method of embeddings and of output layers."""


METHODS = {
    linear.UnquantizedLinearMethod: OpgraftLinear,
    UnquantizedEmbeddingMethod: OpgraftEmbedding,
}
"""Weight method of vLLM → opgraft's. Quantized layers have other methods and stay as they are."""


def replace_layers() -> None:
    """Give the layers of vLLM these methods, if opgraft has a kernel for linear layers."""
    if operator(functional.linear) is None:
        return
    for module, names in PLAIN.items():
        for name in names:
            target = getattr(module, name)
            if not is_taken(target):
                _replace_layer(target)


def _replace_layer(target: Any) -> None:
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        target.__init__(self, *args, **kwargs)
        note_layer()
        method = METHODS.get(type(self.quant_method))
        if method is not None:
            self.quant_method = method()
        elif self.quant_method is not None:
            kept = type(self.quant_method).__name__
            REPORT.leave(f"{target.__name__} with {kept}", "opgraft offers no such weight method")

    register(target, ("linear",), {"__init__": construct})
