"""All modules and names of vLLM that this package answers.

The names are of two kinds. ``counterparts.py`` lists the names that opgraft has. The table below
lists the names that the modules of ``vllm_parts`` adapt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from opgraft_vllm_bridge.counterparts import COUNTERPARTS

_PARTS = "opgraft_vllm_bridge.vllm_parts"

_ATTENTION = {"attention_layer": "Attention"}
_CONFIG = "VllmConfig get_current_vllm_config get_current_vllm_config_or_none"
_DIVIDING = {"distributed_utils": "divide split_tensor_along_last_dim"}
_QUANTIZATION = (
    "QuantizationConfig QuantizationMethods get_quantization_config register_quantization_config"
)
_VARIABLES = (
    "VLLM_COMPUTE_NANS_IN_LOGITS VLLM_CONFIGURE_LOGGING VLLM_LOGGING_CONFIG_PATH "
    "VLLM_LOGGING_LEVEL VLLM_PLUGINS VLLM_USE_MODELSCOPE"
)
_FORMATTERS = {"logging_utils": "ColoredFormatter NewLineFormatter"}
_PLATFORM = "CpuArchEnum Platform PlatformEnum"
_REASONING = {"left_out": "ReasoningParserManager"}
_TOOLS = {"left_out": "ToolParserManager"}
_VERSIONS = "__version__ __version_tuple__"

_ADAPTED: Mapping[str, Mapping[str, str]] = {
    "vllm": {"version": _VERSIONS, "models": "ModelRegistry"},
    "vllm.attention": _ATTENTION,
    "vllm.attention.layer": _ATTENTION,
    "vllm.compilation.decorators": {"interfaces": "support_torch_compile"},
    "vllm.config": {
        "config": f"{_CONFIG} CUDAGraphMode CacheConfig CompilationConfig DeviceConfig "
        "KVTransferConfig LoadConfig ModelConfig ParallelConfig SchedulerConfig"
    },
    "vllm.config.cache": {"config": "CacheConfig"},
    "vllm.config.compilation": {"config": "CUDAGraphMode CompilationConfig"},
    "vllm.config.device": {"config": "DeviceConfig"},
    "vllm.config.load": {"config": "LoadConfig"},
    "vllm.config.model": {"config": "ModelConfig"},
    "vllm.config.parallel": {"config": "ParallelConfig"},
    "vllm.config.scheduler": {"config": "SchedulerConfig"},
    "vllm.config.vllm": {"config": _CONFIG},
    "vllm.distributed": _DIVIDING,
    "vllm.distributed.utils": _DIVIDING,
    "vllm.distributed.ec_transfer.ec_connector.factory": {"left_out": "ECConnectorFactory"},
    "vllm.engine.arg_utils": {"arguments": "EngineArgs"},
    # The place in earlier versions.
    "vllm.entrypoints.openai.tool_parsers": _TOOLS,
    "vllm.entrypoints.openai.tool_parsers.abstract_tool_parser": _TOOLS,
    "vllm.envs": {"envs": _VARIABLES},
    "vllm.forward_context": {
        "forward_context": "ForwardContext get_forward_context is_forward_context_available "
        "set_forward_context"
    },
    "vllm.logger": {"logging_config": "DEFAULT_LOGGING_CONFIG"},
    "vllm.logging_utils": _FORMATTERS,
    "vllm.logging_utils.formatter": _FORMATTERS,
    "vllm.model_executor.layers.attention": _ATTENTION,
    "vllm.model_executor.layers.attention.attention": _ATTENTION,
    "vllm.model_executor.layers.fused_moe.router.grouped_topk_router": {
        "routing": "fused_grouped_topk"
    },
    "vllm.model_executor.layers.linear": {
        "quantization": "register_weight_loader_v2_supported_method"
    },
    "vllm.model_executor.layers.quantization": {"quantization": _QUANTIZATION},
    "vllm.model_executor.layers.quantization.base_config": {"quantization": "QuantizationConfig"},
    "vllm.model_executor.model_loader": {"left_out": "register_model_loader"},
    "vllm.model_executor.models": {"models": "ModelRegistry"},
    "vllm.model_executor.models.config": {
        "model_configs": "MODELS_CONFIG_MAP VerifyAndUpdateConfig"
    },
    "vllm.model_executor.models.interfaces": {
        "interfaces": "HasInnerState IsHybrid SupportsLoRA SupportsPP"
    },
    "vllm.model_executor.models.interfaces_base": {
        "interfaces": "attn_type",
        "left_out": "default_pooling_type",
    },
    "vllm.model_executor.models.registry": {"models": "ModelRegistry"},
    "vllm.model_executor.models.utils": {
        "model_parts": "PPMissingLayer extract_layer_index is_pp_missing_parameter "
        "make_empty_intermediate_tensors_factory make_layers maybe_prefix",
        "weight_names": "WeightsMapper",
    },
    "vllm.model_executor.parameter": {
        "parameter": "BasevLLMParameter ChannelQuantScaleParameter ModelWeightParameter "
        "PackedvLLMParameter PerTensorScaleParameter RowvLLMParameter"
    },
    "vllm.model_executor.utils": {"model_utils": "maybe_disable_graph_partition"},
    "vllm.multimodal": {"left_out": "MULTIMODAL_REGISTRY"},
    "vllm.platforms": {"platforms": _PLATFORM, "current": "current_platform"},
    "vllm.platforms.cpu": {"cpu": "CpuPlatform"},
    "vllm.platforms.interface": {"platforms": f"{_PLATFORM} DeviceCapability UnspecifiedPlatform"},
    "vllm.reasoning": _REASONING,
    "vllm.reasoning.abs_reasoning_parsers": _REASONING,
    "vllm.sequence": {"model_parts": "IntermediateTensors"},
    "vllm.tool_parsers": _TOOLS,
    "vllm.tool_parsers.abstract_tool_parser": _TOOLS,
    "vllm.transformers_utils.config": {"model_configs": "_CONFIG_REGISTRY"},
    "vllm.triton_utils": {"triton_utils": "HAS_TRITON tl triton"},
    "vllm.utils": {
        "torch_utils": "STR_DTYPE_TO_TORCH_DTYPE direct_register_custom_op get_dtype_size",
        "arguments": "FlexibleArgumentParser",
    },
    "vllm.utils.argparse_utils": {"arguments": "FlexibleArgumentParser"},
    "vllm.utils.math_utils": {
        "math_utils": "cdiv next_power_of_2 prev_power_of_2 round_down round_up"
    },
    "vllm.utils.platform_utils": {"current": "is_pin_memory_available"},
    "vllm.utils.torch_utils": {
        "torch_utils": "STR_DTYPE_TO_TORCH_DTYPE direct_register_custom_op get_dtype_size "
        "set_default_torch_dtype set_random_seed vllm_lib"
    },
    "vllm.v1.attention.backend": {
        "attention": "AttentionBackend AttentionImpl AttentionMetadata AttentionMetadataBuilder "
        "AttentionType",
        "forward_context": "CommonAttentionMetadata",
    },
    "vllm.v1.attention.backends.registry": {"attention": "AttentionBackendEnum register_backend"},
    "vllm.v1.attention.backends.utils": {"forward_context": "CommonAttentionMetadata"},
    "vllm.version": {"version": _VERSIONS},
}
"""Module of vLLM → module of ``vllm_parts`` → the names that the latter adapts."""


def _names_of(module: str) -> dict[str, str]:
    """Return name → home, for a module of vLLM. An adapted name goes before a counterpart."""
    homes = dict(COUNTERPARTS.get(module, {}))
    for part, names in _ADAPTED.get(module, {}).items():
        homes.update(dict.fromkeys(names.split(), f"{_PARTS}.{part}"))
    return homes


NAMES: Mapping[str, Mapping[str, str]] = {
    module: _names_of(module) for module in {**COUNTERPARTS, **_ADAPTED}
}
"""Module of vLLM → name → the module with that name."""


def _above(module: str) -> Iterator[str]:
    """Yield the packages of a module, the innermost first."""
    while module := module.rpartition(".")[0]:
        yield module


MODULES = NAMES.keys() | {above for module in NAMES for above in _above(module)}
"""The modules of vLLM with names here, and the packages that they are in."""


def is_adapted(home: str) -> bool:
    """Return True for the modules of ``vllm_parts``. Their classes declare all their attributes."""
    return home.startswith(_PARTS)
