"""Embedding, output layer and logits on real ranks give what one rank gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from opgraft import ops
from opgraft.errors import LayerError, QuantizationError, WeightError
from opgraft.ops.embedding.ranges import Vocabulary
from opgraft.ops.linear.methods import UnquantizedLinearMethod
from opgraft.ops.linear.quantization_config import QuantizationConfig
from support.ranks import Ranks
from torch import nn
from torch.nn import functional as F


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


TABLE = torch.randn(1010, 8, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([[0, 5, 511, 512], [513, 700, 1000, 1009]])


def load(layer: nn.Module, whole: torch.Tensor) -> None:
    weight: Any = layer.get_parameter("weight")
    weight.data.fill_(torch.nan)
    weight.weight_loader(weight, whole)


def embedded() -> Any:
    layer = ops.VocabParallelEmbedding(1010, 8)
    load(layer, TABLE)
    return layer(IDS), tuple(layer.weight.shape), bool(layer.weight.isfinite().all())


def test_embedding(two: Ranks) -> None:
    """A rank has half of the padded rows, those for no id zero; together they have every vector."""
    for vectors, shape, finite in two.run(embedded):
        assert shape == (512, 8)
        assert finite
        assert torch.equal(vectors, F.embedding(IDS, TABLE))


def test_embedding_alone() -> None:
    """One rank has all rows."""
    layer = ops.VocabParallelEmbedding(1010, 8)
    load(layer, TABLE)
    assert torch.equal(layer(IDS), F.embedding(IDS, TABLE))
    assert layer.get_sharded_to_full_mapping() is None


ADDED = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
WITH_ADDED = torch.tensor([0, 1009, 1010, 1017, 1018, 1025, 600])


def with_added() -> Any:
    layer = ops.VocabParallelEmbedding(1026, 8, org_num_embeddings=1010)
    load(layer, TABLE)
    shard = layer.shard_indices
    rows = ADDED[shard.added_vocab_start_index - 1010 : shard.added_vocab_end_index - 1010]
    start = shard.num_org_elements_padded
    layer.weight.data[start : start + len(rows)] = rows
    attributes = (
        layer.num_embeddings_padded,
        layer.num_embeddings_per_partition,
        start,
        layer.num_added_embeddings,
    )
    head = ops.ParallelLMHead(1026, 8, org_num_embeddings=1010)
    head.tie_weights(layer)
    hidden = torch.cat((TABLE, ADDED))[:5]
    return layer(WITH_ADDED), attributes, ops.LogitsProcessor(1026)(head, hidden), hidden


def test_added_embeddings(two: Ranks) -> None:
    """Added ids have rows at the end of each rank's part, own ids 512 rows before them, and logits in their order."""
    table = torch.cat((TABLE, ADDED))
    for vectors, attributes, logits, hidden in two.run(with_added):
        assert attributes == (1088, 544, 512, 16)
        assert torch.equal(vectors, table[WITH_ADDED])
        torch.testing.assert_close(logits, hidden @ table.t())


def test_added_embeddings_alone() -> None:
    """On one rank, too, added ids have their rows behind the padding of the model's own."""
    vectors, attributes, logits, hidden = with_added()
    table = torch.cat((TABLE, ADDED))
    assert attributes == (1088, 1088, 1024, 16)
    assert torch.equal(vectors, table[WITH_ADDED])
    torch.testing.assert_close(logits, hidden @ table.t())


def logits_of_own_ids() -> Any:
    head = ops.ParallelLMHead(1026, 8, org_num_embeddings=1010)
    load(head, TABLE)
    return ops.LogitsProcessor(1026, 1010)(head, TABLE[:5])


def test_logits_without_added_ids(two: Ranks) -> None:
    """Logits of the model's own ids only leave out the rows of added ones, which lie between them over ranks."""
    for found in (*two.run(logits_of_own_ids), logits_of_own_ids()):
        torch.testing.assert_close(found, TABLE[:5] @ TABLE.t())


def test_tying_to_another_embedding() -> None:
    """An embedding with other ids or vectors has no weight that fits, even where padding makes the rows as many."""
    head = ops.ParallelLMHead(10, 8, prefix="lm_head")
    for other in (ops.VocabParallelEmbedding(12, 8), ops.VocabParallelEmbedding(10, 4)):
        with pytest.raises(
            LayerError, match="'lm_head' cannot share the weight of VocabParallelEmbedding"
        ):
            head.tie_weights(other)
    assert head.tie_weights(ops.VocabParallelEmbedding(10, 8)) is head


def test_logits_of_more_ids_than_there_are() -> None:
    """Padding is no id."""
    head = ops.ParallelLMHead(10, 8, prefix="lm_head")
    with pytest.raises(
        LayerError, match=r"logits of 20 ids are wanted, and ParallelLMHead 'lm_head' has 10"
    ):
        ops.LogitsProcessor(20)(head, TABLE[:5])


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("size", "own"), [(1026, 1010), (1010, 1010), (64, 64), (130, 65)])
def test_every_id_has_one_row(ranks: int, size: int, own: int) -> None:
    """The parts of all ranks have each id once, and the mapping names every row once, ids first."""
    vocabulary = Vocabulary(size, own, 64, ranks, "")
    shards = [vocabulary.shard(rank) for rank in range(ranks)]
    ids = [i for s in shards for i in range(s.org_vocab_start_index, s.org_vocab_end_index)]
    ids += [i for s in shards for i in range(s.added_vocab_start_index, s.added_vocab_end_index)]
    assert ids == list(range(size))
    assert sum(s.num_elements_padded for s in shards) == vocabulary.padded
    assert sorted(vocabulary.full_mapping()) == list(range(vocabulary.padded))


HIDDEN = torch.randn(3, 8, generator=torch.Generator().manual_seed(2))
BIAS = torch.randn(1010, generator=torch.Generator().manual_seed(3))


def logits(bias: bool, cap: float | None, scale: float) -> Any:
    head = ops.ParallelLMHead(1010, 8, bias=bias, prefix="lm_head")
    load(head, TABLE)
    if bias:
        parameter: Any = head.bias
        parameter.weight_loader(parameter, BIAS)
    processor = ops.LogitsProcessor(1010, soft_cap=cap, scale=scale)
    plain = processor(head, HIDDEN)
    processor.logits_processors = [lambda logits: logits + 1]
    return plain, processor(head, HIDDEN)


@pytest.mark.parametrize(
    ("bias", "cap", "scale"), [(False, None, 1.0), (True, None, 0.5), (True, 3.0, 2.0)]
)
def test_logits(two: Ranks, bias: bool, cap: float | None, scale: float) -> None:
    """Gathered without padding; capped, then scaled, then given to further functions."""
    expected = F.linear(HIDDEN, TABLE, BIAS if bias else None)
    expected = (expected if cap is None else cap * torch.tanh(expected / cap)) * scale
    for found in (*two.run(logits, bias, cap, scale), logits(bias, cap, scale)):
        torch.testing.assert_close(found[0], expected)
        torch.testing.assert_close(found[1], expected + 1)


def test_logits_as_input() -> None:
    """Logits that are given are capped and scaled only."""
    head = ops.ParallelLMHead(1010, 8)
    given = torch.randn(2, 1010)
    assert torch.equal(
        ops.LogitsProcessor(1010, scale=2.0, logits_as_input=True)(head, given), given * 2
    )


def test_an_output_layer_is_not_called() -> None:
    """It only holds the weight, for the logits processor."""
    with pytest.raises(LayerError, match="LogitsProcessor computes logits"):
        ops.ParallelLMHead(1010, 8)(HIDDEN)


def refusals() -> list[str]:
    makers = (
        lambda: ops.VocabParallelEmbedding(1, 8, prefix="embed"),
        lambda: ops.VocabParallelEmbedding(101, 8, padding_size=5, prefix="embed"),
        lambda: ops.VocabParallelEmbedding(100, 8, org_num_embeddings=200, prefix="embed"),
    )
    messages = []
    for make in makers:
        with pytest.raises(LayerError) as caught:
            make()
        messages.append(str(caught.value))
    return messages


def test_vocabularies_that_ranks_cannot_share(two: Ranks) -> None:
    """The error names the layer, the size, and what to change."""
    few, odd, wrong = two.run(refusals)[0]
    assert "embedding 'embed': a vocabulary of 1 cannot be shared by 2 tensor-parallel ranks" in few
    assert "padding_size=5" not in few
    assert "num_embeddings is 100, fewer than the 200 of org_num_embeddings" in wrong
    assert "padding_size=5 is" in odd


class LinearOnly(QuantizationConfig):
    def get_name(self) -> str:
        return "linear_only"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32]

    @classmethod
    def from_config(cls, config: Any) -> LinearOnly:
        return cls()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> UnquantizedLinearMethod | None:
        return None if prefix == "skipped" else UnquantizedLinearMethod()


def test_a_weight_method_without_embedding() -> None:
    """An embedding refuses it; an output layer, which looks nothing up, takes it."""
    with pytest.raises(
        QuantizationError,
        match=r"'embed': the weight method UnquantizedLinearMethod has no embedding",
    ):
        ops.VocabParallelEmbedding(100, 8, quant_config=LinearOnly(), prefix="embed")
    assert issubclass(QuantizationError, NotImplementedError)
    ops.VocabParallelEmbedding(100, 8, quant_config=LinearOnly(), prefix="skipped")
    ops.ParallelLMHead(100, 8, quant_config=LinearOnly(), prefix="lm_head")


def test_a_table_of_another_size() -> None:
    """The error names the layer, the shape of the weight and what was expected."""
    layer = ops.VocabParallelEmbedding(1010, 8, prefix="embed")
    with pytest.raises(
        WeightError, match=r"'embed': .* shape \(1000, 8\), expected 1010 in dimension 0"
    ):
        load(layer, torch.zeros(1000, 8))
