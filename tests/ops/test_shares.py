"""The share of a rank: its memory, its part of block scales, and what it may not be asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from opgraft import distributed, ops
from opgraft.errors import DistributedError, WeightError
from opgraft.ops.weights import process_weights_after_loading, set_weight_attrs
from support.ranks import Ranks
from torch import nn

HIDDEN, INTERMEDIATE, VOCABULARY = 512, 1536, 4096


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def decoder() -> nn.ModuleDict:
    """The layers of a small decoder that have weights."""
    layers = nn.ModuleDict({"embed": ops.VocabParallelEmbedding(VOCABULARY, HIDDEN)})
    for index in range(2):
        layers[f"norm{index}"] = ops.RMSNorm(HIDDEN)
        layers[f"qkv{index}"] = ops.QKVParallelLinear(HIDDEN, 64, 8, 4)
        layers[f"o{index}"] = ops.RowParallelLinear(HIDDEN, HIDDEN, bias=False)
        layers[f"gate_up{index}"] = ops.MergedColumnParallelLinear(
            HIDDEN, [INTERMEDIATE] * 2, bias=False
        )
        layers[f"down{index}"] = ops.RowParallelLinear(INTERMEDIATE, HIDDEN, bias=False)
    layers["head"] = ops.ParallelLMHead(VOCABULARY, HIDDEN)
    return layers


def resident() -> tuple[int, int]:
    """Bytes of parameters when the layers are made, and of them and packed weights once they are loaded."""
    layers = decoder()
    made = sum(parameter.nbytes for parameter in layers.parameters())
    process_weights_after_loading(layers)
    held = [getattr(layer, "_packed", None) for layer in layers.modules()]
    packed = sum(weight.nbytes for weight in held if weight is not None)
    return made, packed + sum(parameter.nbytes for parameter in layers.parameters())


def test_a_rank_has_half_of_the_weights(two: Ranks) -> None:
    """Of two ranks each makes and keeps at most 0.56 of what one rank does, packed weights counted."""
    alone = resident()
    for shares in two.run(resident):
        assert all(share <= 0.56 * whole for share, whole in zip(shares, alone, strict=True))
    assert alone[1] <= 1.1 * alone[0]


def with_gradient(name: str) -> str:
    x = torch.ones(2, 2, requires_grad=True)
    group = distributed.get_tp_group()
    with pytest.raises(DistributedError) as caught:
        getattr(group, name)(x)
    with torch.no_grad():
        getattr(group, name)(x)
    return str(caught.value)


@pytest.mark.parametrize(
    "name", ["all_reduce", "all_gather", "reduce_scatter", "gather", "broadcast"]
)
def test_gradients_are_refused(two: Ranks, name: str) -> None:
    """A collective that would lose a gradient says so; without gradients it runs."""
    for told in two.run(with_gradient, name):
        assert f"{name} was given a tensor that requires a gradient" in told
        assert "torch.no_grad()" in told


def test_alone_gradients_pass() -> None:
    """A rank that is alone trains as any module does."""
    x = torch.ones(2, 4, requires_grad=True)
    layer = ops.RowParallelLinear(4, 4, bias=False, return_bias=False)
    nn.init.ones_(layer.weight)
    layer(x).sum().backward()
    assert torch.equal(x.grad, torch.full((2, 4), 4.0))


def scales(layer: Any, rows: int, columns: int, unit: int) -> torch.Tensor:
    """The scales of blocks of a weight, as a weight method makes them."""
    param = nn.Parameter(torch.zeros(-(-rows // unit), -(-columns // unit)), requires_grad=False)
    set_weight_attrs(
        param, {"output_dim": 0, "input_dim": 1, "output_unit": unit, "input_unit": unit}
    )
    return param


def load_blocks(kind: str, size: int, unit: int) -> torch.Tensor | str:
    whole = torch.arange(float((-(-size // unit)) ** 2)).view(-(-size // unit), -1)
    if kind == "column":
        layer: Any = ops.ColumnParallelLinear(size, size, bias=False)
        param = scales(layer, size // 2, size, unit)
    else:
        layer = ops.RowParallelLinear(size, size, bias=False)
        param = scales(layer, size, size // 2, unit)
    try:
        layer.weight_loader(param, whole)
    except WeightError as error:
        return str(error)
    return param.data


@pytest.mark.parametrize(("kind", "dim"), [("column", 0), ("row", 1)])
def test_block_scales_are_cut(two: Ranks, kind: str, dim: int) -> None:
    """Each rank has the scales of its blocks."""
    parts = two.run(load_blocks, kind, 256, 64)
    assert torch.equal(torch.cat(parts, dim), torch.arange(16.0).view(4, 4))


@pytest.mark.parametrize(("kind", "part"), [("column", "rows 0 to 99"), ("row", "columns 0 to 99")])
def test_blocks_that_cross_the_border(two: Ranks, kind: str, part: str) -> None:
    """A block of which two ranks have a part is an error that names the part and the size of a block."""
    told = two.run(load_blocks, kind, 200, 128)
    assert part in told[0]
    assert all("one number for each 128" in answer for answer in told)


def logits_on_first() -> torch.Tensor | None:
    head, hidden = ops.ParallelLMHead(96, 16), torch.ones(3, 16)
    weight = torch.randn((96, 16), generator=torch.Generator().manual_seed(0))
    head.weight.weight_loader(head.weight, weight)
    communicator: Any = distributed.get_tp_group().communicator
    communicator.use_all_gather = False
    try:
        return ops.LogitsProcessor(96)(head, hidden)
    finally:
        del communicator.use_all_gather


def test_logits_on_the_first_rank_only(two: Ranks) -> None:
    """Where the communicator does not gather on all ranks, only the first has logits."""
    first, second = two.run(logits_on_first)
    weight = torch.randn((96, 16), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(first, torch.ones(3, 16) @ weight.t())
    assert second is None
