"""Construction of models: one signature, older ones adapted, each prefix used once."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft import CompilationConfig, OpgraftConfig, PluggableClass
from opgraft.config import CacheConfig, ModelConfig, QuantizationSettings
from opgraft.errors import ConstructionError
from opgraft.models import Model, load_model
from opgraft.models.construction import construct, constructing
from opgraft.ops import RowParallelLinear, SiluAndMul
from opgraft.ops.prefixes import claim_prefix
from safetensors.torch import save_file
from torch import nn


class Layer:
    def __init__(self, *, opgraft_config: OpgraftConfig, prefix: str = "") -> None:
        claim_prefix(prefix, self)
        self.prefix = prefix
        self.op = SiluAndMul()


class Decoder:
    def __init__(
        self,
        *,
        opgraft_config: OpgraftConfig,
        prefix: str = "",
        names: tuple[str, ...] = ("a", "b"),
    ) -> None:
        self.layers = [
            Layer(opgraft_config=opgraft_config, prefix=f"{prefix}layers.{name}") for name in names
        ]


class Twice(Decoder):
    def __init__(self, *, opgraft_config: OpgraftConfig, prefix: str = "") -> None:
        super().__init__(opgraft_config=opgraft_config, prefix=prefix, names=("a", "a"))


class Pair:
    """A model made of two, the second of which may be given the prefix of the first."""

    second = "language."

    def __init__(self, *, opgraft_config: OpgraftConfig, prefix: str = "") -> None:
        self.vision = Decoder(opgraft_config=opgraft_config, prefix=f"{prefix}vision.")
        self.language = construct(
            Decoder, opgraft_config=opgraft_config, prefix=f"{prefix}{self.second}"
        )


class OlderDecoder:
    def __init__(
        self, config: Any, cache_config: Any = None, quant_config: Any = None, prefix: str = ""
    ) -> None:
        self.arguments = (config, cache_config, quant_config, prefix)


class Demanding:
    def __init__(self, config: Any, lora_config: Any) -> None: ...


def test_every_part_can_be_constructed_alone() -> None:
    """A layer and a model are constructed with an empty config, without anything around them, as often as one likes."""
    for _ in range(2):
        assert Layer(opgraft_config=OpgraftConfig(), prefix="x").prefix == "x"
        assert len(Pair(opgraft_config=OpgraftConfig()).language.layers) == 2


def test_a_model_is_composed_of_models() -> None:
    """Parts have the prefix of their place; a second model of the same names is another model."""
    for _ in range(2):
        made = construct(Pair, opgraft_config=OpgraftConfig())
        assert [layer.prefix for layer in made.language.layers] == [
            "language.layers.a",
            "language.layers.b",
        ]


def test_a_prefix_that_is_used_twice_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers under one prefix would load the same weights: the error names prefix and classes."""
    message = r"under the prefix 'm\.layers\.a': Layer and Layer"
    with pytest.raises(ConstructionError, match=message):
        construct(Twice, opgraft_config=OpgraftConfig(), prefix="m.")
    monkeypatch.setattr(Pair, "second", "vision.")
    with pytest.raises(ConstructionError, match=r"'vision\.layers\.a'"):
        construct(Pair, opgraft_config=OpgraftConfig())
    assert construct(
        Decoder, opgraft_config=OpgraftConfig(), prefix="m."
    )  # what failed is forgotten


def test_ops_within_a_model_follow_its_config() -> None:
    """The config that is handed down decides on the ops that layers construct."""
    config = OpgraftConfig(compilation_config=CompilationConfig(custom_ops=["none"]))
    made = construct(Decoder, opgraft_config=config)
    assert "'none' in custom_ops (opgraft_config)" in made.layers[0].op.decision.reason
    with constructing(OpgraftConfig()):
        assert "disabled" not in SiluAndMul().decision.reason


def test_older_signatures_are_adapted_with_a_warning() -> None:
    """An older constructor gets the sections that it names, resolved, and a warning that names its class."""
    config = OpgraftConfig(cache=CacheConfig(block_size=64))
    with pytest.warns(
        DeprecationWarning, match=r"OlderDecoder has an older constructor \(config, cache_config"
    ):
        made = construct(OlderDecoder, opgraft_config=config, prefix="m", config="checkpoint")
    checkpoint, cache, quant, prefix = made.arguments
    assert (checkpoint, cache.block_size, cache.prefix_reuse, prefix) == (
        "checkpoint",
        64,
        True,
        "m",
    )
    assert quant is None
    with pytest.warns(DeprecationWarning, match="OlderDecoder"):
        made = construct(OlderDecoder, opgraft_config=config, config=1, quant_config="awq")
    assert made.arguments[2] == "awq"


def test_the_present_signature_warns_of_nothing() -> None:
    """A class with the uniform constructor is called as it is."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        construct(Decoder, opgraft_config=OpgraftConfig(), config="unused")


def test_an_older_signature_that_asks_for_more_is_an_error() -> None:
    """A required parameter that nothing gives is named, with what there is."""
    error = pytest.raises(ConstructionError, match=r"Demanding requires .*'lora_config'")
    with pytest.warns(DeprecationWarning, match="Demanding"), error:
        construct(Demanding, opgraft_config=OpgraftConfig(), config=1)


class OlderForCausalLM(Model):
    """A model as older hosts have them, whose layer is quantized."""

    def __init__(self, config: Any, cache_config: Any, quant_config: Any, prefix: str = "") -> None:
        nn.Module.__init__(self)
        self.model_config, self.cache_config = config, cache_config
        options = {"quant_config": quant_config, "bias": False, "return_bias": False}
        self.proj = RowParallelLinear(config.hidden_size, 32, prefix=f"{prefix}proj", **options)


@pytest.mark.parametrize("method", [None, "int8"])
def test_a_checkpoint_is_loaded_into_an_older_signature(tmp_path: Path, method: str | None) -> None:
    """The class gets the architecture's config, and a layer of it the method that the settings ask for."""
    transformers = pytest.importorskip("transformers")
    PluggableClass.register("OlderForCausalLM")(OlderForCausalLM)
    transformers.LlamaConfig(architectures=["OlderForCausalLM"], hidden_size=64).save_pretrained(
        tmp_path
    )
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    save_file({"proj.weight": weight}, tmp_path / "model.safetensors")
    config = OpgraftConfig(
        model=ModelConfig(name=str(tmp_path)),
        quantization=QuantizationSettings(method=method),
        cache=CacheConfig(block_size=64),
    )
    with pytest.warns(DeprecationWarning, match="OlderForCausalLM has an older constructor"):
        model: Any = load_model(config)
    assert (model.model_config.hidden_size, model.cache_config.block_size) == (64, 64)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    difference = (model.proj(x) - x @ weight.T).abs().max()
    assert (difference < 1e-4) == (method is None)
    assert difference < 1
