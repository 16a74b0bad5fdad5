"""The quantization ``lossless12``: layers that load plain weights and compute with the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opgraft import ops
from opgraft.config import QuantizationSettings
from opgraft.errors import QuantizationError
from opgraft.ops.weights import process_weights_after_loading
from opgraft.quantization import Lossless12Config, quantization_named
from opgraft.quantization.settings import choose_quantization
from torch import Tensor, nn


@pytest.fixture(autouse=True)
def in_bfloat16() -> Any:
    """Layers are made in bfloat16, the only dtype of the quantization."""
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape) / shape[-1] ** 0.5


def load(layer: nn.Module, whole: Tensor, *shard: Any) -> None:
    param: Any = layer.get_parameter("weight")
    param.weight_loader(param, whole, *shard)


def test_layers_compute_the_same_bits() -> None:
    """A row-parallel layer and a merged one give the bits of the plain weight, in less memory."""
    config = quantization_named("lossless12")()
    weights = [drawn(48, 200) for _ in range(2)]
    row: Any = ops.RowParallelLinear(
        200, 48, bias=False, quant_config=config, prefix="down", return_bias=False
    )
    load(row, weights[0])
    merged: Any = ops.MergedColumnParallelLinear(
        200, [48, 48], bias=False, quant_config=config, prefix="gate_up", return_bias=False
    )
    for shard, weight in enumerate(weights):
        assert merged.weight.is_meta
        load(merged, weight, shard)
    x = drawn(5, 200)
    for layer, whole in ((row, weights[0]), (merged, torch.cat(weights))):
        process_weights_after_loading(layer)
        assert torch.equal(layer(x), nn.functional.linear(x, whole))
        size = sum(each.nbytes for each in layer.parameters())
        assert size < 0.8 * whole.nbytes


def test_a_tied_head_and_its_embedding() -> None:
    """An embedding looks up the same numbers, and the head that shares it gives the same logits."""
    config = Lossless12Config()
    config.embeddings = frozenset({"embed", "lm_head"})
    weight = drawn(64, 96)
    weight[5, 7] = 2.0**-100
    embedding: Any = ops.VocabParallelEmbedding(64, 96, quant_config=config, prefix="embed")
    head: Any = ops.ParallelLMHead(64, 96, quant_config=config, prefix="lm_head")
    load(embedding, weight)
    assert head.tie_weights(embedding) is embedding
    ids = torch.tensor([[5, 63, 0], [5, 5, 1]])
    assert torch.equal(embedding(ids), weight[ids])
    x = drawn(3, 96)
    logits = embedding.quant_method.apply(embedding, x)
    assert torch.equal(logits, nn.functional.linear(x, weight))


def test_experts_stay_plain() -> None:
    """No kernel of experts takes 12 bits."""
    experts = ops.FusedMoE(4, 2, 64, 32, quant_config=Lossless12Config(), prefix="experts")
    assert {each.dtype for each in experts.parameters()} == {torch.bfloat16}


def test_other_dtypes_are_refused() -> None:
    """A model in another dtype than bfloat16 says which setting to change."""
    torch.set_default_dtype(torch.float32)
    with pytest.raises(QuantizationError, match=r"lossless12 does not compute in torch\.float32"):
        choose_quantization(
            QuantizationSettings(method="lossless12", skip=[], by_prefix={}), {}, {}
        )
