"""Parallel linear layers on real ranks give what the whole layer gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from opgraft import ops
from opgraft.errors import LayerError, WeightError
from opgraft.models.lazy import Bounds, LazyTensor, StoredTensor
from opgraft.ops.linear import LinearBase
from opgraft.ops.weights import LoadedTensor, process_weights_after_loading
from support.ranks import Ranks
from torch import nn
from torch.nn import functional as F


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


class Counted(StoredTensor):
    """A stored tensor that counts what is read of it."""

    def __init__(self, whole: torch.Tensor) -> None:
        super().__init__(whole.shape, whole.dtype)
        self.whole = whole
        self.elements = 0

    def read(self, bounds: Bounds) -> torch.Tensor:
        part = self.whole[tuple(slice(one.start, one.stop) for one in bounds)].clone()
        self.elements += part.numel()
        return part


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator) / shape[-1] ** 0.5


def load(layer: nn.Module, name: str, whole: torch.Tensor, *shard: Any) -> int:
    """Load a weight as a loader does; return how many elements were read."""
    param: Any = layer.get_parameter(name)
    stored = Counted(whole)
    param.weight_loader(param, LazyTensor(stored), *shard)
    return stored.elements


X, W, B = drawn(5, 12), drawn(8, 12), drawn(8)


def column(gather: bool) -> Any:
    layer = ops.ColumnParallelLinear(12, 8, gather_output=gather, prefix="up")
    read = load(layer, "weight", W), load(layer, "bias", B)
    process_weights_after_loading(layer)
    return layer(X), tuple(layer.weight.shape), layer.tp_rank, layer.output_size_per_partition, read


def test_column_parallel(two: Ranks) -> None:
    """A rank reads, has and computes its rows; gathered, the whole result is on each."""
    expected = F.linear(X, W, B)
    for rank, ((out, bias), shape, tp_rank, size, read) in enumerate(two.run(column, False)):
        assert (shape, tp_rank, size, read, bias) == ((4, 12), rank, 4, (48, 4), None)
        torch.testing.assert_close(out, expected.chunk(2, -1)[rank])
    for (out, _), *_ in two.run(column, True):
        torch.testing.assert_close(out, expected)


def row(cut: bool, skip_bias_add: bool) -> Any:
    layer = ops.RowParallelLinear(12, 8, input_is_parallel=cut, skip_bias_add=skip_bias_add)
    read = load(layer, "weight", W)
    load(layer, "bias", B)
    x = X.chunk(2, -1)[layer.tp_rank] if cut else X
    out, bias = layer(x)
    return (
        out,
        None if bias is None else bias.data,
        tuple(layer.weight.shape),
        layer.input_size_per_partition,
        read,
    )


@pytest.mark.parametrize("cut", [True, False])
def test_row_parallel(two: Ranks, cut: bool) -> None:
    """The ranks add what they have of their columns, the bias once; a bias that is skipped is returned."""
    for out, bias, shape, size, read in two.run(row, cut, False):
        assert (shape, size, read, bias) == ((8, 6), 6, 48, None)
        torch.testing.assert_close(out, F.linear(X, W, B))
    for out, bias, *_ in two.run(row, cut, True):
        torch.testing.assert_close(out, F.linear(X, W))
        assert torch.equal(bias, B)


def replicated() -> Any:
    layer = ops.ReplicatedLinear(12, 8, return_bias=False)
    load(layer, "weight", W)
    load(layer, "bias", B)
    return layer(X)


def test_replicated(two: Ranks) -> None:
    """Every rank has the whole layer; without ``return_bias`` a call returns the result alone."""
    for out in two.run(replicated):
        torch.testing.assert_close(out, F.linear(X, W, B))


GATE, UP = drawn(8, 12, seed=1), drawn(4, 12, seed=2)


def merged(how: str) -> Any:
    layer = ops.MergedColumnParallelLinear(12, [8, 4], bias=False, gather_output=how == "gathered")
    if how == "one weight":
        load(layer, "weight", torch.cat((GATE, UP)))
    elif how == "several":
        load(layer, "weight", torch.cat((GATE, UP)), (0, 1))
    else:
        load(layer, "weight", GATE, 0)
        load(layer, "weight", UP, 1)
    return layer(X)[0], layer.output_partition_sizes


@pytest.mark.parametrize("how", ["by layer", "one weight", "several"])
def test_merged_column_parallel(two: Ranks, how: str) -> None:
    """A rank has its part of each layer, side by side, loaded layer by layer or from one weight of all."""
    gate, up = F.linear(X, GATE), F.linear(X, UP)
    for rank, (out, sizes) in enumerate(two.run(merged, how)):
        assert sizes == [4, 2]
        torch.testing.assert_close(
            out, torch.cat((gate.chunk(2, -1)[rank], up.chunk(2, -1)[rank]), -1)
        )


def test_merged_gathered(two: Ranks) -> None:
    """Gathered, the outputs of each layer lie side by side, as one layer on one rank has them."""
    for out, _ in two.run(merged, "gathered"):
        torch.testing.assert_close(out, torch.cat((F.linear(X, GATE), F.linear(X, UP)), -1))


def qkv(heads: int, kv_heads: int, v_head_size: int, at_once: bool) -> Any:
    layer = ops.QKVParallelLinear(12, 3, heads, kv_heads, bias=True, v_head_size=v_head_size)
    weights = [
        drawn(n, 12, seed=i)
        for i, n in enumerate((heads * 3, kv_heads * 3, kv_heads * v_head_size))
    ]
    biases = [weight[:, 0].contiguous() for weight in weights]
    if at_once:
        load(layer, "weight", torch.cat(weights))
        load(layer, "bias", torch.cat(biases))
    else:
        for shard, weight, bias in zip("qkv", weights, biases, strict=True):
            load(layer, "weight", weight, shard)
            load(layer, "bias", bias, shard)
    out, _ = layer(X)
    return out, (layer.num_heads, layer.num_kv_heads, layer.num_kv_head_replicas), weights, biases


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("kv_heads", [8, 4, 2, 1])
def test_qkv_parallel(four: Ranks, kv_heads: int, at_once: bool) -> None:
    """A rank has whole heads; with fewer key heads than ranks, neighbouring ranks have the same one."""
    heads = 8
    for rank, (out, counts, weights, biases) in enumerate(
        four.run(qkv, heads, kv_heads, 2, at_once)
    ):
        replicas = max(1, 4 // kv_heads)
        assert counts == (2, max(1, kv_heads // 4), replicas)
        whole = [F.linear(X, w, b) for w, b in zip(weights, biases, strict=True)]
        q = whole[0].chunk(4, -1)[rank]
        k, v = (each.chunk(min(4, kv_heads), -1)[rank // replicas] for each in whole[1:])
        torch.testing.assert_close(out, torch.cat((q, k, v), -1))


def uneven(heads: int, kv_heads: int, at_once: bool) -> Any:
    layer = ops.QKVParallelLinear(12, 3, heads, kv_heads, bias=True, v_head_size=2)
    down = ops.RowParallelLinear(heads * 2, 12, return_bias=False, shard=layer.uneven_output())
    load(down, "weight", drawn(12, heads * 2, seed=9))
    whole = ops.RowParallelLinear(
        heads * 2, 12, input_is_parallel=False, return_bias=False, shard=layer.uneven_output()
    )
    load(whole, "weight", drawn(12, heads * 2, seed=9))
    first, count = layer.first_head * 2, layer.num_heads * 2
    values = drawn(5, heads * 2, seed=8)
    return qkv(heads, kv_heads, 2, at_once), down(values[:, first : first + count]), whole(values)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 9), (15, 5), (12, 6)])
def test_key_heads_that_ranks_do_not_divide(
    four: Ranks, heads: int, kv_heads: int, at_once: bool
) -> None:
    """The first ranks have a key head more, with its query heads, and the layer behind has as many columns."""
    expected = F.linear(drawn(5, heads * 2, seed=8), drawn(12, heads * 2, seed=9))
    group, counted = heads // kv_heads, [kv_heads // 4 + (rank < kv_heads % 4) for rank in range(4)]
    firsts = torch.tensor([0, *counted]).cumsum(0)
    for rank, ((out, counts, weights, biases), *mapped) in enumerate(
        four.run(uneven, heads, kv_heads, at_once)
    ):
        first, last = int(firsts[rank]), int(firsts[rank + 1])
        assert counts == ((last - first) * group, last - first, 1)
        q, k, v = (F.linear(X, w, b) for w, b in zip(weights, biases, strict=True))
        parts = (
            q[:, first * group * 3 : last * group * 3],
            k[:, first * 3 : last * 3],
            v[:, first * 2 : last * 2],
        )
        torch.testing.assert_close(out, torch.cat(parts, -1))
        for each in mapped:
            torch.testing.assert_close(each, expected)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = ops.MergedColumnParallelLinear(12, [8, 8], bias=False)
        self.act = ops.SiluAndMul()
        self.down = ops.RowParallelLinear(8, 12, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.up(x)
        out, _ = self.down(self.act(hidden))
        return out


def block() -> Any:
    torch._dynamo.utils.counters.clear()
    model = Block()
    load(model.up, "weight", drawn(16, 12, seed=3))
    load(model.down, "weight", drawn(12, 8, seed=4))
    with torch.no_grad():
        program = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
        pairs = [(program(x), model(x)) for x in (drawn(4, 12), drawn(7, 12), drawn(9, 12))]
    return pairs, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_compiled_whole(two: Ranks) -> None:
    """A feed-forward block over two ranks compiles without a break, once for all sizes."""
    gate_up, down = drawn(16, 12, seed=3), drawn(12, 8, seed=4)
    for pairs, graphs in two.run(block):
        assert graphs == 1
        for (compiled, eager), rows in zip(pairs, (4, 7, 9), strict=True):
            torch.testing.assert_close(compiled, eager)
            gate, up = F.linear(drawn(rows, 12), gate_up).chunk(2, -1)
            torch.testing.assert_close(eager, F.linear(F.silu(gate) * up, down))


def test_alone() -> None:
    """On one rank every layer is whole, and nothing is sent anywhere."""
    layer = ops.RowParallelLinear(12, 8, return_bias=False)
    load(layer, "weight", W)
    load(layer, "bias", B)
    torch.testing.assert_close(layer(X), F.linear(X, W, B))
    assert not torch.distributed.is_initialized()


def test_every_tensor_can_be_loaded() -> None:
    """A tensor is a loaded tensor, and so is anything with a shape, a dtype and parts."""
    assert isinstance(W, LoadedTensor)
    assert isinstance(LazyTensor(Counted(W)), LoadedTensor)


def refusals() -> list[str]:
    makers = (
        lambda: ops.ColumnParallelLinear(12, 7, prefix="a.up"),
        lambda: ops.RowParallelLinear(7, 12, prefix="a.down"),
        lambda: ops.MergedColumnParallelLinear(12, [6, 3], prefix="a.gate_up"),
        lambda: ops.QKVParallelLinear(12, 4, 3, 1, prefix="a.qkv"),
        lambda: ops.QKVParallelLinear(12, 4, 7, 3, prefix="a.qkv"),
    )
    messages = []
    for make in makers:
        with pytest.raises(LayerError) as caught:
            make()
        messages.append(str(caught.value))
    return messages


def test_sizes_that_ranks_do_not_divide(two: Ranks) -> None:
    """The error names the layer, the size and the number of ranks."""
    up, down, gate_up, heads, groups = two.run(refusals)[0]
    assert (
        "ColumnParallelLinear 'a.up': the output size is 7, which 2 tensor-parallel ranks do not divide"
        in up
    )
    assert "RowParallelLinear 'a.down': the input size is 7" in down
    assert "'a.gate_up': the output size is 3" in gate_up
    assert "'a.qkv': the number of heads is 3, which 2 tensor-parallel ranks do not divide" in heads
    assert "'a.qkv': the number of heads is 7, which 3 key heads do not divide" in groups


def odd_key_heads() -> str:
    with pytest.raises(LayerError) as caught:
        ops.QKVParallelLinear(12, 4, 12, 3, prefix="a.qkv")
    return str(caught.value)


def test_key_heads_that_ranks_cannot_share(four: Ranks) -> None:
    """Fewer key heads than ranks must divide the ranks."""
    assert "4 tensor-parallel ranks cannot share 3 key heads" in four.run(odd_key_heads)[0]


@pytest.mark.parametrize("key_heads", [0, -1])
def test_attention_without_key_heads(key_heads: int) -> None:
    """There is at least one."""
    with pytest.raises(
        LayerError, match=f"'a.qkv': the number of key heads is {key_heads}, expected at least 1"
    ):
        ops.QKVParallelLinear(12, 4, 4, key_heads, prefix="a.qkv")


def test_a_bias_for_results_that_are_not_reduced() -> None:
    """A bias would be counted wrongly by whoever adds up the results of ranks; skipped, it is fine."""
    with pytest.raises(ValueError, match="reduce_results=False with a bias"):
        ops.RowParallelLinear(4, 4, reduce_results=False)
    ops.RowParallelLinear(4, 4, reduce_results=False, skip_bias_add=True)
    ops.RowParallelLinear(4, 4, reduce_results=False, bias=False)


@pytest.mark.parametrize(
    ("make", "shape", "shard", "told"),
    [
        (
            lambda: ops.ColumnParallelLinear(4, 6, prefix="up"),
            (7, 4),
            (),
            r"'up': .* shape \(7, 4\), expected 6",
        ),
        (
            lambda: ops.ColumnParallelLinear(4, 6, prefix="up"),
            (6, 5),
            (),
            r"'up': .* shape \(6, 5\), expected \(6, 4",
        ),
        (
            lambda: ops.RowParallelLinear(4, 6, prefix="down"),
            (6, 8),
            (),
            r"'down': .* expected 4 in dimension 1",
        ),
        (
            lambda: ops.ReplicatedLinear(4, 6, prefix="gate"),
            (6,),
            (),
            r"'gate': .* expected 6 in dimension 0 of 2",
        ),
        (lambda: ops.MergedColumnParallelLinear(4, [6, 2]), (8, 4), (0,), "expected 6"),
        (lambda: ops.MergedColumnParallelLinear(4, [6, 2]), (6, 4), (2,), "no layer 2 among its 2"),
        (lambda: ops.QKVParallelLinear(4, 2, 2), (4, 4), ("w",), "no projection 'w'"),
    ],
)
def test_weights_that_do_not_fit(
    make: Any, shape: tuple[int, ...], shard: tuple[Any, ...], told: str
) -> None:
    """The error names the layer, the shape of the weight and what was expected."""
    layer = make()
    with pytest.raises(WeightError, match=told):
        load(layer, "weight", torch.zeros(shape), *shard)


class Halved(LinearBase):
    """A layer of a plugin, which loads half of each weight."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self._create_weights(4, [2])

    def weight_loader(self, param: Any, loaded_weight: LoadedTensor) -> None:
        param.data.copy_(loaded_weight[...] / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._apply_method(x, None)


def test_a_layer_of_a_plugin_brings_its_loader() -> None:
    """A subclass's loader is the parameter's; one without is told so when it is made, not when weights are loaded."""
    layer, whole = Halved(), drawn(2, 4)
    load(layer, "weight", whole)
    torch.testing.assert_close(layer(torch.eye(4)), whole.T / 2)

    class Without(LinearBase):
        def __init__(self) -> None:
            super().__init__(4, 2)
            self._create_weights(4, [2])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    with pytest.raises(AttributeError, match="'Without' object has no attribute 'weight_loader'"):
        Without()
