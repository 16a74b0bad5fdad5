"""Parts of vLLM that the bridge adapts, as plugins use them."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import logging.config
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import opgraft
import pytest
import torch
from opgraft import OpgraftConfig, ops, set_config
from opgraft.errors import ConfigError, LayerError, ModelError
from opgraft.ops.attention import AttentionBatch, attending
from opgraft.quantization import quantization_named
from support.small_words import word_llama
from support.vllm_plugin import imports_forgotten, install_bridge


@pytest.fixture
def vllm(site: Any) -> Any:
    """Imports a module of vLLM, which the bridge answers."""
    install_bridge(site)
    with imports_forgotten():
        importlib.import_module("opgraft_vllm_bridge.finder").VllmFinder("tests").install()
        yield importlib.import_module


def doubling(vllm: Any) -> Any:
    """A config that a plugin registers by vLLM's decorator."""
    quantization = vllm("vllm.model_executor.layers.quantization")
    linear = vllm("vllm.model_executor.layers.linear")
    parameter = vllm("vllm.model_executor.parameter")

    class Doubling(linear.LinearMethodBase):
        def create_weights(
            self,
            layer,
            input_size_per_partition,
            output_partition_sizes,
            input_size,
            output_size,
            params_dtype,
            **attrs,
        ) -> None:
            data = torch.empty(
                sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype
            )
            loader = attrs["weight_loader"]
            weight = parameter.ModelWeightParameter(
                data=data, input_dim=1, output_dim=0, weight_loader=loader
            )
            layer.register_parameter("weight", weight)
            scale = parameter.PerTensorScaleParameter(
                data=torch.empty(len(output_partition_sizes)), weight_loader=loader
            )
            layer.register_parameter("scale", scale)

        def apply(self, layer, x, bias=None):
            return torch.nn.functional.linear(x, 2 * layer.weight, bias)

    @quantization.register_quantization_config("doubling")
    class DoublingConfig(quantization.QuantizationConfig):
        def get_name(self) -> str:
            return "doubling"

        def get_supported_act_dtypes(self):
            return [torch.float32]

        @classmethod
        def from_config(cls, config):
            assert cls.get_from_keys(config, ["bits", "w_bits"]) == 8
            assert cls.get_from_keys_or(config, ["group"], -1) == -1
            return cls()

        def get_quant_method(self, layer, prefix):
            return Doubling() if isinstance(layer, linear.LinearBase) else None

    return DoublingConfig


def test_a_quantization_of_a_plugin(vllm: Any) -> None:
    """Its config, asked for by name, makes the weights of layers, with vLLM's parameters."""
    quantization, registered = vllm("vllm.model_executor.layers.quantization"), doubling(vllm)
    config = quantization.get_quantization_config("doubling").from_config({"w_bits": 8})
    assert quantization_named("doubling") is registered
    with pytest.raises(ValueError, match="none of the settings bits, w_bits"):
        config.from_config({})
    layer = ops.MergedColumnParallelLinear(6, [4, 2], bias=False, quant_config=config, prefix="mlp")
    parts = torch.randn(4, 6), torch.randn(2, 6)
    for index, part in enumerate(parts):
        layer.weight.weight_loader(layer.weight, part, index)
        layer.scale.weight_loader(layer.scale, torch.tensor(float(index)), index)
    x = torch.randn(3, 6)
    torch.testing.assert_close(layer(x)[0], x @ (2 * torch.cat(parts)).T)
    assert layer.scale.tolist() == [0.0, 1.0]


def test_a_quantization_of_opgraft_stays(vllm: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A plugin's config of the same name is left out with a warning, and the class stays as it is."""
    before = quantization_named("gguf")

    quantization = vllm("vllm.model_executor.layers.quantization")

    @quantization.register_quantization_config("gguf")
    class Theirs(quantization.QuantizationConfig):
        pass

    assert quantization_named("gguf") is before
    assert Theirs.__name__ == "Theirs"
    assert "the quantization 'gguf' of a plugin is left out, as there is one" in caplog.text


def test_entries_without_a_use_are_reported(vllm: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Parsers, connectors and the like are named in warnings, and their classes stay as they are."""
    reasoning = vllm("vllm.reasoning").ReasoningParserManager
    tools = vllm("vllm.tool_parsers").ToolParserManager
    earlier = vllm("vllm.entrypoints.openai.tool_parsers.abstract_tool_parser").ToolParserManager
    factory = vllm("vllm.distributed.ec_transfer.ec_connector.factory").ECConnectorFactory
    inputs = vllm("vllm.multimodal").MULTIMODAL_REGISTRY
    load = vllm("vllm.model_executor.model_loader").register_model_loader
    pooling = vllm("vllm.model_executor.models.interfaces_base").default_pooling_type

    class Thinks:
        pass

    assert earlier is tools
    assert reasoning.register_module("thinks", module=Thinks) is Thinks
    assert reasoning.register_module(["a", "b"])(Thinks) is Thinks
    assert tools.register_module()(Thinks) is Thinks
    tools.register_lazy_module("late", "none.such", "Late")
    factory.register_connector("nixl", "none.such", "Nixl")
    assert inputs.register_processor(print, info=print, dummy_inputs=print)(Thinks) is Thinks
    assert load("acme")(Thinks) is Thinks
    assert pooling(seq_pooling_type="MEAN")(Thinks) is Thinks
    assert (Thinks.default_seq_pooling_type, Thinks.default_tok_pooling_type) == ("MEAN", "ALL")
    assert reasoning.reasoning_parsers == dict.fromkeys(["thinks", "a", "b"], Thinks)
    assert tools.tool_parsers == {"Thinks": Thinks}
    told = [record.getMessage() for record in caplog.records]
    kinds = ["reasoning parser"] * 3 + ["tool parser"] * 2
    kinds += [
        "connector",
        "processor of inputs for",
        "loader of the format",
        "pooling of the model",
    ]
    names = ["thinks", "a", "b", "Thinks", "late", "nixl", "Thinks", "acme", "Thinks"]
    for kind, name, message in zip(kinds, names, told, strict=True):
        assert f"the {kind} '{name}' of a plugin is left out" in message


def test_the_batch_is_the_forward_context(vllm: Any) -> None:
    """Sequences, lengths and slots of each layer are told in vLLM's terms, where a batch is computed."""
    forward_context = vllm("vllm.forward_context")
    assert not forward_context.is_forward_context_available()
    with pytest.raises(LayerError, match="no batch is computed"):
        forward_context.get_forward_context()
    table = torch.tensor([[1, 0], [2, 3]])
    batch = AttentionBatch.of_sequences(
        [2, 3], [2, 5], table, {"layers.0": torch.zeros(4)}, block_size=4
    )
    with attending(batch):
        context = forward_context.get_forward_context()
    metadata = context.attn_metadata["layers.0"]
    assert (
        metadata.num_reqs,
        metadata.num_actual_tokens,
        metadata.max_query_len,
        metadata.max_seq_len,
    ) == (2, 5, 3, 5)
    assert metadata.naive_query_lens().tolist() == [2, 3]
    assert metadata.query_start_loc_cpu.tolist() == [0, 2, 5]
    assert context.slot_mapping["layers.0"].tolist() == [4, 5, 10, 11, 12]


def test_settings_in_terms_of_vllm(vllm: Any) -> None:
    """A plugin reads the settings that hold; one that opgraft has not is no attribute."""
    config = vllm("vllm.config")
    ours = opgraft.config.config_from_fields(
        {"cache.block_size": 48, "parallel.tensor": 2, "model.dtype": "bfloat16"}
    )
    with set_config(ours):
        current = config.get_current_vllm_config()
    assert (current.cache_config.block_size, current.parallel_config.world_size) == (48, 2)
    assert (current.model_config.dtype, current.device_config.device.type) == (
        torch.bfloat16,
        "cpu",
    )
    with pytest.raises(
        ConfigError, match="sets block_size of CacheConfig, which changes nothing any more"
    ):
        current.cache_config.block_size = 3
    with pytest.raises(AttributeError, match="num_speculative_tokens"):
        _ = current.scheduler_config.num_speculative_tokens
    with set_config(OpgraftConfig(plugins=("vllm_plugin",), plugins_disable=())):
        assert vllm("vllm.envs").VLLM_PLUGINS == ["vllm_plugin"]


def test_a_checkpoint_that_changes_is_read_again(vllm: Any, tmp_path: Path) -> None:
    """A model's config is that of its folder now, although it is kept for the layers of a model."""
    config, file = vllm("vllm.config"), word_llama(tmp_path) / "config.json"
    with set_config(OpgraftConfig(model=opgraft.config.ModelConfig(name=str(file.parent)))):
        before = config.get_current_vllm_config().model_config.hf_config
        assert config.get_current_vllm_config().model_config.hf_config is before
        file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 0.5}))
        assert config.get_current_vllm_config().model_config.hf_config.rms_norm_eps == 0.5


@pytest.mark.parametrize("replica", [0, 3])
def test_seeds(vllm: Any, replica: int) -> None:
    """The same seed gives the same numbers of Python, NumPy and torch, for another replica others."""
    set_random_seed = vllm("vllm.utils.torch_utils").set_random_seed

    def drawn(seed: int, replica: int) -> tuple[float, float, float]:
        set_random_seed(seed, replica)
        return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: S311  # no secrets

    assert drawn(5, replica) == drawn(5, replica)
    assert len({*drawn(5, replica), *drawn(5, replica + 1), *drawn(6, replica)}) == 9


def test_small_helpers(vllm: Any) -> None:
    """They compute what their names say."""
    math = vllm("vllm.utils.math_utils")
    for x in (1, 2, 3, 7, 8, 9, 1000):
        for y in (1, 3, 8):
            assert math.cdiv(x, y) == -(-x // y)
            assert math.round_up(x, y) % y == 0 <= math.round_up(x, y) - x < y
            assert math.round_down(x, y) % y == 0 <= x - math.round_down(x, y) < y
        assert x <= math.next_power_of_2(x) < 2 * x
        assert math.prev_power_of_2(x) <= x < 2 * math.prev_power_of_2(x)
    distributed = vllm("vllm.distributed")
    assert [
        part.tolist() for part in distributed.split_tensor_along_last_dim(torch.arange(6), 3)
    ] == [
        [0, 1],
        [2, 3],
        [4, 5],
    ]
    with pytest.raises(LayerError, match="do not divide"):
        distributed.divide(7, 2)
    with vllm("vllm.utils.torch_utils").set_default_torch_dtype(torch.float64):
        assert torch.ones(()).dtype == torch.float64
    assert torch.ones(()).dtype == torch.float32


def test_a_logger_of_a_plugins_own(vllm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A plugin copies vLLM's settings of logging for its own logger, which then writes to stderr."""
    assert vllm("vllm.envs").VLLM_CONFIGURE_LOGGING
    config = copy.deepcopy(vllm("vllm.logger").DEFAULT_LOGGING_CONFIG)
    for part in ("formatters", "handlers", "loggers"):
        config[part]["acme"] = config[part].pop("vllm")
    config["handlers"]["acme"]["formatter"] = "acme"
    config["loggers"]["acme"]["handlers"] = ["acme"]
    logging.config.dictConfig(config)
    acme = logging.getLogger("acme")
    acme.info("ready")
    acme.handlers.clear()
    assert re.search(r"^INFO .*\[test_vllm_parts.py:\d+\] ready$", capsys.readouterr().err, re.M)


def test_names_of_quantizations_and_attention(vllm: Any) -> None:
    """They are there for what plugins do with them."""
    linear, attention = vllm("vllm.model_executor.layers.linear"), vllm("vllm.v1.attention.backend")
    assert (
        linear.register_weight_loader_v2_supported_method(linear.LinearMethodBase)
        is linear.LinearMethodBase
    )
    assert attention.AttentionType("decoder") == "decoder"
    assert vllm("vllm.utils.platform_utils").is_pin_memory_available() in (True, False)
    assert vllm("vllm.config").get_current_vllm_config().model_config.quantization is None


def test_levels_of_devices(vllm: Any) -> None:
    """Compute levels are compared as vLLM's platforms are asked."""
    interface = vllm("vllm.platforms.interface")

    class Acme(interface.Platform):
        _enum = interface.PlatformEnum.CUDA

        @classmethod
        def get_device_capability(cls, device_id=0):
            return interface.DeviceCapability(9, 0)

    acme = Acme()
    assert acme.is_cuda_alike()
    assert not acme.is_out_of_tree()
    assert [acme.has_device_capability(level) for level in ((8, 9), 90, (10, 0))] == [
        True,
        True,
        False,
    ]
    assert [acme.is_device_capability(level) for level in ((9, 0), 90, 89)] == [True, True, False]
    assert [acme.is_device_capability_family(level) for level in (90, 100)] == [True, False]
    assert not interface.Platform().has_device_capability(10)
    with pytest.raises(NotImplementedError):
        acme.get_device_name()


def test_experts_of_the_best_groups(vllm: Any) -> None:
    """The function chooses as the op of opgraft does, with a bias for the choice."""
    router = vllm("vllm.model_executor.layers.fused_moe.router.grouped_topk_router")
    logits, bias = torch.randn(5, 8), torch.randn(8)
    hidden = torch.randn(5, 3)
    weights, ids = router.fused_grouped_topk(hidden, logits, 2, True, bias, 4, 2, "sigmoid")
    scores = logits.double().sigmoid()
    biased = scores + bias.double()
    groups = biased.view(5, 4, 2).sum(-1).topk(2).indices
    allowed = torch.zeros(5, 4, dtype=torch.bool).scatter(1, groups, True).repeat_interleave(2, 1)
    expected = biased.masked_fill(~allowed, -torch.inf).topk(2).indices
    assert [set(row) for row in ids.tolist()] == [set(row) for row in expected.tolist()]
    chosen = scores.gather(1, ids.long())
    torch.testing.assert_close(
        weights.double(), chosen / chosen.sum(-1, keepdim=True), rtol=1e-5, atol=1e-6
    )


def test_triton_is_there_only_where_it_can_be_used(vllm: Any) -> None:
    """Without a driver a module with Triton kernels can be imported, and its helpers compute."""
    utils = vllm("vllm.triton_utils")
    if utils.HAS_TRITON:
        pytest.skip("this machine has a device of Triton's")

    @utils.triton.autotune(configs=[utils.triton.Config({"BLOCK": 8})], key=["n"])
    @utils.triton.jit
    def kernel(x: Any, n: utils.tl.constexpr) -> int:
        return 3

    assert kernel(None, 1) == 3
    assert utils.triton.cdiv(7, 2) == 4


def test_a_context_of_a_plugins_own(vllm: Any) -> None:
    """Metadata that a plugin sets is returned within the block, of a class that derives from vLLM's too."""
    context = vllm("vllm.forward_context")
    base = vllm("vllm.v1.attention.backend").CommonAttentionMetadata

    @dataclasses.dataclass
    class Own(base):
        chunks: int = 3

    given = {field.name: None for field in dataclasses.fields(base)}
    metadata = {"layers.0": Own(**given)}
    with context.set_forward_context(metadata, None):
        assert context.is_forward_context_available()
        assert context.get_forward_context().attn_metadata["layers.0"].chunks == 3
    assert not context.is_forward_context_available()


def test_an_op_finds_its_layer(vllm: Any) -> None:
    """A layer that a plugin puts into the static context is found by name while a batch is computed."""
    context, utils = vllm("vllm.forward_context"), vllm("vllm.utils.torch_utils")
    settings = vllm("vllm.config").get_current_vllm_config
    layer = torch.nn.Linear(2, 2)
    settings().compilation_config.static_forward_context["acme.0"] = layer

    def acme_linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return context.get_forward_context().no_compile_layers[name](x)

    utils.direct_register_custom_op("acme_linear", acme_linear, fake_impl=lambda x, name: x)
    x = torch.randn(3, 2)
    with context.set_forward_context(None, settings()), torch.inference_mode():
        torch.testing.assert_close(torch.ops.vllm.acme_linear(x, "acme.0"), layer(x))


def test_backends_are_noted_and_do_not_run(vllm: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A plugin may derive a backend and register it; a warning says that opgraft's attention runs."""
    registry, backend = (
        vllm("vllm.v1.attention.backends.registry"),
        vllm("vllm.v1.attention.backend"),
    )

    @registry.register_backend(registry.AttentionBackendEnum.CUSTOM)
    class Mine(backend.AttentionBackend):
        pass

    assert "an attention backend of vLLM is registered as CUSTOM, to no effect" in caplog.text
    with pytest.raises(TypeError, match="abstract"):
        Mine()


def test_arguments_of_an_engine(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options are taken with either spelling and their types, and make settings in vLLM's terms."""
    arguments = vllm("vllm.engine.arg_utils").EngineArgs
    parser = arguments.add_cli_args(vllm("vllm.utils.argparse_utils").FlexibleArgumentParser())
    given = parser.parse_args(["--tensor_parallel_size", "2", "--dtype=bfloat16"])
    assert (given.tensor_parallel_size, given.dtype) == (2, "bfloat16")
    line = "acme --block_size 64 --gpu_memory_utilization=0.5 --no-enable_chunked_prefill"
    monkeypatch.setattr("sys.argv", line.split())
    parsed = arguments.from_cli_args(parser.parse_args())
    assert parsed == arguments(
        block_size=64, gpu_memory_utilization=0.5, enable_chunked_prefill=False
    )
    settings = parsed.create_engine_config()
    assert settings.cache_config.block_size == 64
    assert settings.scheduler_config.enable_chunked_prefill is False
    assert parsed.create_model_config().model == settings.model_config.model
    made = arguments(dtype="bfloat16", block_size=64, max_num_seqs=7).create_engine_config()
    assert (made.model_config.dtype, made.cache_config.block_size) == (torch.bfloat16, 64)
    assert (made.scheduler_config.max_num_seqs, made.scheduler_config.chunked_prefill_enabled) == (
        7,
        True,
    )
    assert made.cache_config.user_specified_block_size
    assert (made.quant_config, made.speculative_config) == (None, None)


def test_lines_of_a_log(vllm: Any) -> None:
    """Each line of a message begins alike, and another handler sees the plain level."""
    formatters = vllm("vllm.logging_utils")
    record = logging.LogRecord("a", logging.INFO, "/x/file.py", 3, "one\ntwo", None, None)
    text = formatters.NewLineFormatter("%(levelname)s [%(fileinfo)s:%(lineno)d] %(message)s")
    assert text.format(record) == "INFO [file.py:3] one\r\nINFO [file.py:3] two"
    coloured = formatters.ColoredFormatter("%(levelname)s %(message)s").format(record)
    assert coloured.startswith("\033[32mINFO\033[0m one")
    assert record.levelname == "INFO"


def test_names_of_dtypes(vllm: Any) -> None:
    """A dtype's name and its bytes."""
    utils = vllm("vllm.utils.torch_utils")
    assert utils.STR_DTYPE_TO_TORCH_DTYPE["bfloat16"] == torch.bfloat16
    assert [utils.get_dtype_size(each) for each in (torch.int8, torch.float64)] == [1, 8]
    assert vllm("vllm.model_executor.utils").maybe_disable_graph_partition("eager") == {}
    embedding = vllm("vllm.model_executor.layers.vocab_parallel_embedding")
    rows, mask = embedding.get_masked_input_and_mask(torch.tensor([3, 9]), 2, 5, 0, 8, 8)
    assert (rows.tolist(), mask.tolist()) == ([1, 0], [False, True])


def test_a_version_in_numbers(vllm: Any) -> None:
    """The tuple has the numbers of the version, in both places."""
    assert vllm("vllm").__version__.startswith("0.33.0+opgraft")
    assert vllm("vllm").__version_tuple__ == vllm("vllm.version").__version_tuple__ == (0, 33, 0)


def test_names_of_weights(vllm: Any) -> None:
    """Every change that matches is made, in vLLM's order; a change to None drops the weight."""
    mapper = vllm("vllm.model_executor.models.utils").WeightsMapper
    stacked = {".gate": (".gate_up", 0), ".up": (".gate_up", 1)}
    first = mapper(
        orig_to_new_stacked=stacked,
        orig_to_new_regex={re.compile(r"\.h\.(\d+)\."): r".layers.\1."},
        orig_to_new_prefix={"model.": "language.", "language.layers.0.": None},
    )
    second = mapper(
        orig_to_new_substr={".mlp.": r".\1."},
        orig_to_new_prefix={"language.": "inner."},
        orig_to_new_suffix={".gamma": ".weight"},
    )
    both = first | second
    assert both.map_name("model.h.12.mlp.x.mlp.gamma") == r"inner.layers.12.\1.x.mlp.weight"
    assert both.map_name("model.h.0.mlp.gamma") is None
    assert both.map_name("gamma") == "gamma"
    assert both.merged() == {"gate_up": {"gate": 0, "up": 1}}


def test_helpers_of_models(vllm: Any) -> None:
    """Prefixes, indices of layers, tensors between stages, and the kind of a model's attention."""
    utils = vllm("vllm.model_executor.models.utils")
    assert [utils.maybe_prefix(prefix, "norm") for prefix in ("", "model")] == [
        "norm",
        "model.norm",
    ]
    assert utils.extract_layer_index("model.layers.12.self_attn") == 12
    assert utils.extract_layer_index("model.layers.12.attn.1", num_attn_module=2) == 25
    with pytest.raises(ModelError, match=r"'model\.norm' has 0 numbers in its name, expected one"):
        utils.extract_layer_index("model.norm")
    with pytest.raises(ModelError, match="has 2 numbers in its name"):
        utils.extract_layer_index("model.layers.12.attn.1")
    make = utils.make_empty_intermediate_tensors_factory(["hidden"], 3)
    tensors = make(2, torch.float16, torch.device("cpu"))
    assert (len(tensors), tensors["hidden"].dtype) == (1, torch.float16)
    tensors["more"] = torch.ones(2, 3)
    assert {name: len(part) for name, part in tensors[:1].items()} == {"hidden": 1, "more": 1}

    @vllm("vllm.model_executor.models.interfaces_base").attn_type("encoder_only")
    @vllm("vllm.compilation.decorators").support_torch_compile(dynamic_arg_dims={"x": 0})
    class Encoder(vllm("vllm.model_executor.models.interfaces").SupportsPP):
        pass

    assert (Encoder.attn_type, Encoder.supports_pp) == ("encoder_only", True)


def test_a_config_of_a_plugin(vllm: Any) -> None:
    """transformers makes a checkpoint's config of the class that a plugin has registered."""
    registry = vllm("vllm.transformers_utils.config")._CONFIG_REGISTRY
    transformers = importlib.import_module("transformers")

    class AcmeConfig(transformers.LlamaConfig):
        model_type = "acme_of_tests"

    configs = importlib.import_module("opgraft_vllm_bridge.vllm_parts.model_configs")
    configs.give_configs_to_transformers()
    dict.__setitem__(registry, "acme_of_tests", AcmeConfig)
    configs.give_configs_to_transformers()
    assert type(transformers.AutoConfig.for_model("acme_of_tests", hidden_size=8)) is AcmeConfig


def test_a_platform_without_a_kind(vllm: Any) -> None:
    """Some plugins derive theirs from vLLM's unspecified platform."""
    unspecified = vllm("vllm.platforms.interface").UnspecifiedPlatform
    assert unspecified().is_unspecified()
    assert unspecified.device_type == ""


def test_the_constructor_of_attention(vllm: Any) -> None:
    """It takes vLLM's arguments, makes opgraft's layer, and refuses a layer that opgraft has no use for."""
    attention = vllm("vllm.model_executor.layers.attention").Attention
    cache = dataclasses.replace(
        vllm("vllm.config").get_current_vllm_config().cache_config, sliding_window=7
    )
    made = attention(
        4, 8, 0.5, 2, cache_config=cache, quant_config=None, attn_type="decoder", prefix="a"
    )
    assert type(made) is type(ops.Attention(4, 8, 0.5, 2))
    assert isinstance(made, attention)
    assert (made.num_kv_heads, made.sliding_window, made.prefix) == (2, 7, "a")
    assert attention(4, 8, 0.5, cache_config=cache, per_layer_sliding_window=3).sliding_window == 3
    assert attention(4, 8, 0.5, sinks=torch.zeros(4)).sinks.shape == (4,)
    for refused in ({"alibi_slopes": [1.0]}, {"attn_type": "encoder_only"}):
        (name,) = refused
        with pytest.raises(LayerError, match=f"the layer 'b' is given {name}, and has no use"):
            attention(4, 8, 0.5, prefix="b", **refused)

    @attention.register_oot
    class Mine(attention):
        def attend(self, layer: attention | None = None) -> None: ...

    assert issubclass(Mine, attention)
    assert isinstance(attention(4, 8, 0.5), Mine)


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({"sliding_window": 9}, 9),
        ({"sliding_window": 9, "use_sliding_window": False}, None),
        ({"sliding_window": 9, "layer_types": ["sliding_attention"] * 2}, 9),
        ({"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}, None),
        ({}, None),
    ],
)
def test_the_window_of_a_model(vllm: Any, config: dict[str, Any], window: int | None) -> None:
    """A layer without a window of its own takes that of all layers, if all layers have one."""
    settings = vllm("vllm.config") and importlib.import_module(
        "opgraft_vllm_bridge.vllm_parts.config"
    )
    assert settings._window_of(SimpleNamespace(**config)) == window
    assert settings._window_of(SimpleNamespace(text_config=SimpleNamespace(**config))) == window
