"""Blocks of GGUF files in layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from opgraft import ops
from opgraft.errors import QuantizationError, WeightError
from opgraft.models.lazy import Bounds, LazyTensor, StoredTensor
from opgraft.ops.linear.quantized.storage import dequantize
from opgraft.quantization import GGUFConfig
from opgraft.quantization.gguf_blocks import FORMATS
from torch import Tensor

gguf = pytest.importorskip("gguf")

HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}
"""Where a block has float16 numbers; all other bytes may be anything."""


def drawn(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Draw the bytes of a matrix."""
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows, columns // values, size), dtype=np.uint8)
    for at in HALVES[kind]:
        halves = (random.standard_normal((rows, columns // values, 1)) / 64).astype(np.float16)
        blocks[..., at : at + 2] = halves.view(np.uint8)
    return blocks.reshape(rows, -1)


def numbers(kind: str, data: np.ndarray) -> Tensor:
    """Read blocks as the library does that defines the format."""
    return torch.from_numpy(gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind]).copy())


class Stored(StoredTensor):
    """Bytes in place of a file."""

    def __init__(self, data: Tensor, whole: Tensor | None = None, kind: str | None = None) -> None:
        super().__init__((data if whole is None else whole).shape, torch.float32, kind)
        self.data, self.whole = data, whole

    def read(self, bounds: Bounds) -> Tensor:
        return (self.data if self.whole is None else self.whole)[
            tuple(slice(one.start, one.stop) for one in bounds)
        ]

    def blocks(self) -> StoredTensor:
        return Stored(self.data)


def lazy(kind: str, data: np.ndarray) -> LazyTensor:
    return LazyTensor(Stored(torch.from_numpy(data), numbers(kind, data), kind))


def config(**kinds: str) -> GGUFConfig:
    return GGUFConfig({f"{name}.weight": kind for name, kind in kinds.items()})


def load(layer: Any, tensor: LazyTensor, *shard: Any) -> None:
    layer.weight.weight_loader(layer.weight, tensor, *shard)


def weight_of(layer: Any) -> Tensor:
    return dequantize(layer.weight, layer.scales, layer.offsets, layer.input_size_per_partition)


@pytest.mark.parametrize("kind", HALVES)
def test_blocks_are_held_exactly(kind: str) -> None:
    """A layer holds what the library reads, bit by bit, in as many bits, and computes with it."""
    data = drawn(kind, 12, 512)
    layer = ops.ReplicatedLinear(
        512, 12, False, quant_config=config(down=kind), prefix="down", return_bias=False
    )
    load(layer, lazy(kind, data))
    expected = numbers(kind, data)
    assert torch.equal(weight_of(layer), expected)
    assert layer.weight.dtype == (torch.uint8 if kind.startswith("Q4") else torch.int8)
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        layer(x).double(), x.double() @ expected.double().T, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    "kinds",
    [
        ("Q4_K", "Q4_K", "Q6_K"),
        ("Q4_0", "Q4_1", "Q8_0"),
        ("Q4_0", "Q4_0", "Q8_0"),
        ("Q5_0", "Q5_1", "Q6_K"),
    ],
)
def test_parts_of_several_types(kinds: Sequence[str]) -> None:
    """One layer may have parts of several types, as mixed files have; all stay exact."""
    names = dict(zip(("q", "k", "v"), kinds, strict=True))
    quantization = config(**names)
    quantization.packed_modules_mapping = {"qkv": list(names)}
    layer = ops.QKVParallelLinear(
        256, 16, 4, 2, False, quant_config=quantization, prefix="qkv", return_bias=False
    )
    parts = {
        name: drawn(kind, 64 if name == "q" else 32, 256, seed)
        for seed, (name, kind) in enumerate(names.items())
    }
    for name in ("v", "q", "k"):
        assert layer.weight.is_meta
        load(layer, lazy(names[name], parts[name]), name)
    assert torch.equal(
        weight_of(layer), torch.cat([numbers(names[name], part) for name, part in parts.items()])
    )


def test_layers_that_stay_plain() -> None:
    """Layers whose blocks cannot be held, or that have none, and embeddings with padding are read as numbers."""
    quantization = config(a="Q2_K", b="Q4_0")
    for prefix in ("a", "c"):
        assert quantization.get_quant_method(ops.ReplicatedLinear(32, 8), prefix) is None
    assert quantization.get_quant_method(ops.VocabParallelEmbedding(63, 32), "b") is None
    assert set(FORMATS) == set(HALVES)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q6_K"])
def test_embeddings(kind: str) -> None:
    """Rows are looked up as the numbers of their blocks, and the head that is tied computes with the same codes."""
    embedding: Any = ops.VocabParallelEmbedding(
        64, 256, quant_config=config(embed=kind), prefix="embed"
    )
    part = drawn(kind, 64, 256)
    load(embedding, lazy(kind, part))
    embedding.process_weights_after_loading()
    expected, ids = numbers(kind, part), torch.tensor([[3, 63], [0, 3]])
    assert torch.equal(embedding(ids), expected[ids])
    head: Any = ops.ParallelLMHead(64, 256).tie_weights(embedding)
    x = torch.randn(2, 256)
    torch.testing.assert_close(
        ops.LogitsProcessor(64)(head, x), x @ expected.T, rtol=1e-4, atol=1e-4
    )


def test_what_does_not_fit() -> None:
    """Inputs that cut blocks; weights without blocks, missing or with more rows; checkpoints of other formats."""
    with pytest.raises(
        QuantizationError, match="down has 128 inputs on this rank, which blocks of 256, as Q4_K"
    ):
        ops.ReplicatedLinear(128, 8, quant_config=config(down="Q4_K"), prefix="down")
    layer: Any = ops.ReplicatedLinear(256, 8, quant_config=config(down="Q4_K"), prefix="down")
    with pytest.raises(QuantizationError, match="this weight has no blocks"):
        load(layer, torch.zeros(8, 256))  # type: ignore[arg-type]
    with pytest.raises(QuantizationError, match="its weight was not loaded"):
        layer.process_weights_after_loading()
    with pytest.raises(WeightError, match=r"has shape \(12, 256\), expected 8 in dimension 0"):
        load(layer, lazy("Q4_K", drawn("Q4_K", 12, 256)))
    with pytest.raises(QuantizationError, match="its weight was not loaded"):
        layer.process_weights_after_loading()
    with pytest.raises(
        QuantizationError, match="keeps the blocks of a GGUF file, and this checkpoint is none"
    ):
        GGUFConfig.from_config({})
