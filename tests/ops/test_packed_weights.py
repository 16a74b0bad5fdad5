"""Parallel layers hold their weights packed once they are loaded, where the platform's kernel gains."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import opgraft
import pytest
import torch
from opgraft import ops
from opgraft.errors import WeightError
from opgraft.ops.linear import packed as packed_linear
from opgraft.ops.linear.methods import UnquantizedLinearMethod
from opgraft.ops.weights import process_weights_after_loading
from support.ranks import Ranks
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.skipif(
    packed_linear.missing() is not None, reason=f"{packed_linear.missing()}"
)
SIZE = 1024
WEIGHT = torch.randn((SIZE, SIZE), generator=torch.Generator().manual_seed(0)) / 32


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def loaded(layer: Any, weight: torch.Tensor = WEIGHT) -> Any:
    layer.weight.weight_loader(layer.weight, weight)
    process_weights_after_loading(layer)
    return layer


def linear(**settings: Any) -> Any:
    return loaded(ops.ReplicatedLinear(SIZE, SIZE, bias=False, return_bias=False, **settings))


def nbytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def is_packed(layer: Any) -> bool:
    return layer._packed is not None and not list(layer.parameters())


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(5, SIZE)


def test_loading_packs_and_releases_the_plain_weight(x: torch.Tensor) -> None:
    """The parameter is gone; results and the weight, where it is read, are what they were."""
    layer = linear()
    assert is_packed(layer)
    torch.testing.assert_close(layer(x), F.linear(x, WEIGHT))
    assert torch.equal(layer.weight, WEIGHT)


def split_layers() -> tuple[bool, bool, torch.Tensor]:
    column = loaded(ops.ColumnParallelLinear(SIZE, SIZE, bias=False, return_bias=False))
    row = loaded(ops.RowParallelLinear(SIZE, SIZE, bias=False, return_bias=False))
    x = torch.ones(3, SIZE)
    return is_packed(column), is_packed(row), row(column(x))


def test_each_rank_packs_its_part(two: Ranks) -> None:
    """Two ranks compute over their packed parts what one computes."""
    expected = F.linear(F.linear(torch.ones(3, SIZE), WEIGHT), WEIGHT)
    for first, second, result in two.run(split_layers):
        assert first
        assert second
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def test_a_state_dict_is_plain(x: torch.Tensor) -> None:
    """What is saved is the plain weight, and loading it packs again."""
    layer = linear()
    state = layer.state_dict()
    assert torch.equal(state["weight"], WEIGHT)
    layer.load_state_dict({"weight": WEIGHT * 2})
    assert is_packed(layer)
    torch.testing.assert_close(layer(x), F.linear(x, WEIGHT * 2))


@pytest.mark.parametrize("how", ["deepcopy", "copy", "pickle"])
def test_copies_are_packed_too(x: torch.Tensor, how: str) -> None:
    """A copy has the weight, packed, and goes its own way."""
    layer = linear()
    ways = {
        "deepcopy": copy.deepcopy,
        "copy": copy.copy,
        "pickle": lambda it: pickle.loads(pickle.dumps(it)),  # noqa: S301
    }
    copied = ways[how](layer)
    assert is_packed(copied)
    opgraft.thaw(layer)
    torch.testing.assert_close(copied(x), layer(x))


def test_unpack_gives_the_weight_back() -> None:
    """The parameter is what it was, with what says how it is cut and loaded."""
    layer = linear()
    opgraft.thaw(layer)
    assert torch.equal(layer.get_parameter("weight"), WEIGHT)
    assert layer.weight.output_dim == 0
    loaded(layer, WEIGHT * 3)
    assert torch.equal(layer.weight, WEIGHT * 3)


def test_loading_a_packed_weight_is_refused() -> None:
    """What would be loaded into a copy is an error that says what to do."""
    layer = linear()
    with pytest.raises(WeightError, match=r"call opgraft\.thaw\(model\) before"):
        layer.weight.weight_loader(layer.weight, WEIGHT)


def test_other_dtypes_and_back(x: torch.Tensor) -> None:
    """What can be packed no more is plain; a layer that was never packed stays plain."""
    layer = linear().half()
    assert layer.get_parameter("weight").dtype is torch.float16
    plain = ops.ReplicatedLinear(SIZE, SIZE, bias=False).float()
    assert [name for name, _ in plain.named_parameters()] == ["weight"]


def test_compiled_whole(x: torch.Tensor) -> None:
    """A packed layer is one operator in compiled code, without a break."""
    layer = linear()
    torch.testing.assert_close(
        torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x)
    )


def head(tied: bool) -> Any:
    embedding = ops.VocabParallelEmbedding(SIZE, SIZE)
    output = ops.ParallelLMHead(SIZE, SIZE)
    model = nn.ModuleList([embedding, output.tie_weights(embedding) if tied else output])
    for layer in (embedding, output):
        layer.weight.weight_loader(layer.weight, WEIGHT)
    process_weights_after_loading(model)
    return embedding, output


@pytest.mark.parametrize("tied", [True, False])
def test_output_layers(x: torch.Tensor, tied: bool) -> None:
    """An output layer is packed unless an embedding has the weight, which looks up rows."""
    embedding, output = head(tied)
    assert is_packed(output) is not tied
    assert embedding.get_parameter("weight").shape == (SIZE, SIZE)
    assert (output.weight is embedding.weight) is tied
    torch.testing.assert_close(ops.LogitsProcessor(SIZE)(output, x), F.linear(x, WEIGHT))
    assert torch.equal(embedding(torch.tensor([3])), WEIGHT[3:4])


def test_where_it_does_not_pay() -> None:
    """Small weights, trained ones, and those of an op that is switched off or has another kernel stay plain."""
    small = ops.ReplicatedLinear(8, 8)
    process_weights_after_loading(small)
    assert small._packed is None
    trained = ops.ReplicatedLinear(SIZE, SIZE)
    trained.weight.requires_grad_()
    process_weights_after_loading(trained)
    assert trained._packed is None
    with opgraft.set_config(
        opgraft.OpgraftConfig(compilation_config=opgraft.CompilationConfig(custom_ops=["-linear"]))
    ):
        assert linear()._packed is None


def test_a_weight_method_may_hold_what_is_no_parameter(x: torch.Tensor) -> None:
    """A weight method replaces the parameter by a tensor of its own."""

    @UnquantizedLinearMethod.register_oot
    class Transposes(UnquantizedLinearMethod):
        def process_weights_after_loading(self, layer: Any) -> None:
            weight = layer.weight.data
            del layer.weight
            layer.weight = weight.t().contiguous()

        def apply(
            self, layer: Any, x: torch.Tensor, bias: Any = None, **after: Any
        ) -> torch.Tensor:
            return x @ layer.weight

    layer = linear()
    torch.testing.assert_close(layer(x), F.linear(x, WEIGHT))
    torch.testing.assert_close(copy.deepcopy(layer)(x), F.linear(x, WEIGHT))
