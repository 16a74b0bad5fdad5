"""Quantizing while a plain checkpoint is loaded."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from opgraft import ops
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.errors import LayerError, OpgraftError, QuantizationError
from opgraft.ops.linear.quantization_config import QuantizationConfig
from opgraft.ops.weights import process_weights_after_loading
from opgraft.quantization import (
    Int4Config,
    Int8Config,
    Int8DynamicConfig,
    quantization_named,
    quantizations,
)
from opgraft.quantization.integers import Int8LinearMethod
from opgraft.quantization.patterns import Patterns, expect_used
from torch import Tensor, nn

NAMES = ("int8", "int8_dynamic", "int4", "fp8")
BOUNDS = {"int8": 0.01, "int8_dynamic": 0.02, "int4": 0.12, "fp8": 0.06}
each_name = pytest.mark.parametrize("name", NAMES)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator) / shape[-1] ** 0.5


def load(layer: nn.Module, name: str, whole: Tensor, *shard: Any) -> None:
    param: Any = layer.get_parameter(name)
    param.weight_loader(param, whole, *shard)


def near(got: Any, expected: Tensor, bound: float) -> bool:
    result = got[0] if isinstance(got, tuple) else got
    return bool((result - expected).norm() < bound * expected.norm())


@each_name
def test_a_plain_layer_becomes_quantized(name: str) -> None:
    """A layer that loads a plain weight computes nearly the same, without the plain weight."""
    layer = ops.RowParallelLinear(
        128, 48, quant_config=quantization_named(name)(), prefix="down_proj"
    )
    weight, bias, x = drawn(48, 128), drawn(48), drawn(5, 128)
    assert layer.weight.is_meta
    load(layer, "weight", weight)
    load(layer, "bias", bias)
    process_weights_after_loading(layer)
    assert layer.weight.dtype in (torch.int8, torch.uint8, torch.float8_e4m3fn)
    assert sum(p.nbytes for p in layer.parameters()) < 0.45 * weight.nbytes
    assert near(layer(x), x @ weight.T + bias, BOUNDS[name])


@each_name
def test_several_parts_at_once(name: str) -> None:
    """Two of the layers that one stands for may arrive in one tensor, the third later, or before."""
    weight, x = drawn(48, 128), drawn(5, 128)
    for shards in (((0, 1), 2), (2, (0, 1))):
        layer = ops.MergedColumnParallelLinear(
            128, [16, 16, 16], quant_config=quantization_named(name)(), prefix="in_proj", bias=False
        )
        for shard in shards:
            load(layer, "weight", weight[32:] if shard == 2 else weight[:32], shard)
            assert layer.weight.is_meta == (shard is shards[0])
        process_weights_after_loading(layer)
        assert near(layer(x), x @ weight.T, BOUNDS[name])


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "int8",
            {"bits": 8},
            "Int8Config has no setting 'bits', which the checkpoint's config sets: there are ignore",
        ),
        ("int4", {"group_size": "32"}, "int4: group_size is '32', expected a positive number"),
        ("int4", {"group_size": 0}, "int4: group_size is 0, expected a positive number"),
        (
            "int8",
            {"ignore": "lm_head"},
            "patterns of layers are 'lm_head', expected a list of names",
        ),
        ("int8", {"ignore": [8]}, r"patterns of layers are \[8\], expected a list of names"),
    ],
)
def test_settings_of_a_checkpoint(name: str, settings: dict[str, Any], message: str) -> None:
    """A checkpoint may name a quantization of ours with settings; those that it does not have are refused."""
    with pytest.raises(QuantizationError, match=message):
        quantization_named(name).from_config({"quant_method": name, **settings})


@each_name
def test_parts_of_a_merged_layer(name: str) -> None:
    """Query, key and value arrive one by one; the last one makes the weight quantized."""
    layer = ops.QKVParallelLinear(
        128, 16, 4, 2, quant_config=quantization_named(name)(), prefix="attn.qkv_proj", bias=False
    )
    parts = {"q": drawn(64, 128), "k": drawn(32, 128, seed=1), "v": drawn(32, 128, seed=2)}
    for shard, part in parts.items():
        assert layer.weight.is_meta
        load(layer, "weight", part, shard)
    assert not layer.weight.is_meta
    x = drawn(3, 128)
    assert near(layer(x), x @ torch.cat(list(parts.values())).T, BOUNDS[name])


def test_the_plain_weight_is_released_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a layer is loaded, nothing holds its plain weight any more."""
    seen: list[weakref.ref[Tensor]] = []
    quantize = Int8LinearMethod.quantize

    def watched(self: Any, weight: Tensor) -> Any:
        seen.append(weakref.ref(weight.untyped_storage()))  # type: ignore[arg-type]
        return quantize(self, weight)

    monkeypatch.setattr(Int8LinearMethod, "quantize", watched)
    layer = ops.ColumnParallelLinear(64, 32, quant_config=Int8Config())
    load(layer, "weight", drawn(32, 64))
    gc.collect()
    assert [reference() for reference in seen] == [None]


def test_what_stays_plain() -> None:
    """Layers on the list keep plain weights, and so do embeddings."""
    config = Int8Config(ignore=["model.layers.0", "*.gate_proj"])
    config.packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}
    made = {
        prefix: ops.ColumnParallelLinear(64, 32, quant_config=config, prefix=prefix)
        for prefix in (
            "model.layers.0.mlp.up_proj",
            "model.layers.10.mlp.up_proj",
            "model.layers.1.gate_proj",
        )
    }
    assert [layer.weight.is_meta for layer in made.values()] == [False, True, False]
    expect_used([config.ignore])
    with pytest.raises(
        QuantizationError, match=r"gate_proj match a pattern and model.layers.3.up_proj none"
    ):
        ops.MergedColumnParallelLinear(
            64, [32, 32], quant_config=config, prefix="model.layers.3.gate_up_proj"
        )


@pytest.mark.parametrize("config", [Int8Config(), Int4Config(), Int8DynamicConfig()])
def test_embeddings_that_are_named(config: Any) -> None:
    """An embedding is quantized where it is named in full; a head that is tied to a plain one is not."""
    config.embeddings = frozenset({"embed", "lm_head"})
    plain = ops.VocabParallelEmbedding(64, 128, quant_config=config, prefix="other")
    assert not plain.weight.is_meta
    head: Any = ops.ParallelLMHead(64, 128, quant_config=config, prefix="lm_head")
    with pytest.raises(
        LayerError, match="ParallelLMHead 'lm_head' is to be quantized, and shares the plain weight"
    ):
        head.tie_weights(plain)
    embedding: Any = ops.VocabParallelEmbedding(64, 128, quant_config=config, prefix="embed")
    weight, ids = drawn(64, 128), torch.tensor([5, 63, 0])
    load(embedding, "weight", weight)
    steps = embedding.scales.amax(1, keepdim=True)
    assert ((embedding(ids) - weight[ids]).abs() <= steps[ids] * 0.51).all()
    assert head.tie_weights(embedding) is embedding


def test_patterns() -> None:
    """Names, names of holders, stars and regular expressions; one that no layer answers to is an error."""
    patterns = Patterns(["a.b", "*.c", r"re:x\.\d+$", "nothing"])
    assert [
        patterns.match(name, {}) for name in ("a.b", "a.b.d", "a.bc", "z.c", "x.12", "x.1.y")
    ] == [
        True,
        True,
        False,
        True,
        True,
        False,
    ]
    with pytest.raises(QuantizationError, match="no layer of the model answers to 'nothing'"):
        expect_used([patterns])
    with pytest.raises(QuantizationError, match="is no regular expression"):
        Patterns(["re:("])


def test_groups_that_do_not_fit() -> None:
    """A layer that groups do not divide is refused when it is made, by name."""
    with pytest.raises(
        QuantizationError,
        match="down_proj has 80 inputs on this rank, which groups of 32 do not divide",
    ):
        ops.RowParallelLinear(80, 48, quant_config=Int4Config(group_size=32), prefix="down_proj")


def test_a_weight_that_never_came() -> None:
    """A layer without its weight is an error, not one that computes with nothing."""
    layer = ops.MergedColumnParallelLinear(
        64, [32, 32], quant_config=Int8Config(), prefix="gate_up_proj"
    )
    load(layer, "weight", drawn(32, 64), 0)
    with pytest.raises(
        QuantizationError, match=r"gate_up_proj: its weight.* was not loaded, or not all of it"
    ):
        process_weights_after_loading(layer)


def test_names() -> None:
    """Every quantization is known by its name, which its config tells; another name is an error with the nearest."""
    assert set(NAMES) <= set(quantizations())
    assert all(cls().get_name() == name for name, cls in quantizations().items() if name in NAMES)
    with pytest.raises(
        QuantizationError, match="no quantization is called 'int9': did you mean int"
    ):
        quantization_named("int9")
    made = Int4Config.from_config({"quant_method": "int4", "group_size": 64})
    assert isinstance(made, Int4Config)
    assert made.group_size == 64


@pytest.mark.parametrize("wrong", ["int8", 8, Int8Config], ids=str)
def test_what_is_no_config(wrong: Any) -> None:
    """Every kind of layer names the argument, and shows how a config is made."""
    experts = {"num_experts": 4, "top_k": 2, "hidden_size": 8, "intermediate_size": 8}
    constructions = (
        lambda: ops.ReplicatedLinear(8, 8, quant_config=wrong),
        lambda: ops.VocabParallelEmbedding(16, 8, quant_config=wrong),
        lambda: ops.FusedMoE(**experts, quant_config=wrong),
    )
    for construct in constructions:
        with pytest.raises(QuantizationError, match=r"quantization_named\('int8'\)\(\)"):
            construct()


def test_a_replaced_method() -> None:
    """A subclass that is registered takes the place of a weight method, and a new config its place among the names."""

    class Doubled(Int8LinearMethod):
        def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return 2 * super().apply(layer, x, bias)

    PluggableClass.register_oot(Doubled, name="int8_linear_method")
    layer = ops.ReplicatedLinear(64, 32, quant_config=Int8Config(), bias=False, return_bias=False)
    weight, x = drawn(32, 64), drawn(2, 64)
    load(layer, "weight", weight)
    assert near(layer(x), 2 * x @ weight.T, 0.01)

    @PluggableClass.register("mine")
    class MineConfig(Int8Config):
        def get_name(self) -> str:
            return "mine"

    assert issubclass(quantization_named("mine"), QuantizationConfig)
    assert isinstance(quantization_named("mine")(), MineConfig)


def test_errors_have_one_base() -> None:
    """They are errors of opgraft."""
    assert issubclass(QuantizationError, OpgraftError)
