"""The names of vLLM with a counterpart in opgraft, and hints for some names without one.

A counterpart has the same name. A test compares the signatures with those of an installed vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping

_OPS: Mapping[str, str] = {
    "activation": "FastGELU FatreluAndMul GELU GELUTanh GeluAndMul GeluAndMulSparse MulAndSilu "
    "NewGELU QuickGELU ReLUSquaredActivation SiluAndMul SiluAndMulWithClamp SwigluOAIAndMul "
    "SwigluStepAndMul XIELU",
    "attention": "Attention MLAAttention MMEncoderAttention",
    "attention.attention": "Attention",
    "attention.mla_attention": "MLAAttention",
    "attention.mm_encoder_attention": "MMEncoderAttention",
    "conv": "Conv2dLayer Conv3dLayer",
    "fused_moe": "FusedMoE UnquantizedFusedMoEMethod",
    "fused_moe.fused_moe_modular_method": "FusedMoEModularMethod",
    "fused_moe.layer": "FusedMoE UnquantizedFusedMoEMethod",
    "fused_moe.router.grouped_topk_router": "GroupedTopk",
    "fused_moe.unquantized_fused_moe_method": "UnquantizedFusedMoEMethod",
    "layernorm": "GemmaRMSNorm RMSNorm RMSNormGated",
    "linear": "ColumnParallelLinear LinearBase MergedColumnParallelLinear QKVParallelLinear "
    "ReplicatedLinear RowParallelLinear",
    "logits_processor": "LogitsProcessor",
    "mamba.mamba_mixer": "MambaMixer",
    "mamba.mamba_mixer2": "MambaMixer2 Mixer2RMSNormGated",
    "mamba.short_conv": "ShortConv",
    "mla": "MLAAttention MLAModules MultiHeadLatentAttentionWrapper",
    "quantization.input_quant_fp8": "QuantFP8",
    "quantization.utils.quant_utils": "GroupShape",
    "rotary_embedding": "DeepseekScalingRotaryEmbedding DualChunkRotaryEmbedding "
    "DynamicNTKAlphaRotaryEmbedding DynamicNTKScalingRotaryEmbedding LinearScalingRotaryEmbedding "
    "Llama3RotaryEmbedding Llama4VisionRotaryEmbedding MRotaryEmbedding NTKScalingRotaryEmbedding "
    "Phi3LongRoPEScaledRotaryEmbedding RotaryEmbedding YaRNScalingRotaryEmbedding get_rope",
    "rotary_embedding.base": "RotaryEmbedding RotaryEmbeddingBase",
    "rotary_embedding.common": "ApplyRotaryEmb",
    "rotary_embedding.deepseek_scaling_rope": "DeepseekScalingRotaryEmbedding",
    "rotary_embedding.dual_chunk_rope": "DualChunkRotaryEmbedding",
    "rotary_embedding.dynamic_ntk_alpha_rope": "DynamicNTKAlphaRotaryEmbedding",
    "rotary_embedding.dynamic_ntk_scaling_rope": "DynamicNTKScalingRotaryEmbedding",
    "rotary_embedding.linear_scaling_rope": "LinearScalingRotaryEmbedding",
    "rotary_embedding.llama3_rope": "Llama3RotaryEmbedding",
    "rotary_embedding.llama4_vision_rope": "Llama4VisionRotaryEmbedding",
    "rotary_embedding.mrope": "MRotaryEmbedding apply_interleaved_rope",
    "rotary_embedding.ntk_scaling_rope": "NTKScalingRotaryEmbedding",
    "rotary_embedding.phi3_long_rope_scaled_rope": "Phi3LongRoPEScaledRotaryEmbedding",
    "rotary_embedding.yarn_scaling_rope": "YaRNScalingRotaryEmbedding",
    "vocab_parallel_embedding": "ParallelLMHead VocabParallelEmbedding",
}
"""Module below ``vllm.model_executor.layers`` → its names in ``opgraft.ops``."""

_COLLECTIVES = (
    "tensor_model_parallel_all_gather tensor_model_parallel_all_reduce "
    "tensor_model_parallel_gather tensor_model_parallel_reduce_scatter"
)
_GROUPS = (
    "get_dp_group get_ep_group get_pp_group get_tensor_model_parallel_rank "
    "get_tensor_model_parallel_world_size get_tp_group get_world_group"
)
_KERNELS = "opgraft.kernels"

_OTHERS: Mapping[str, Mapping[str, str]] = {
    "vllm": {"opgraft": "SamplingParams"},
    # Plugins for earlier versions import from the paths of these versions.
    "vllm.attention": {"opgraft.ops": "Attention"},
    "vllm.attention.layer": {"opgraft.ops": "Attention MLAAttention"},
    "vllm.attention.layers.mm_encoder_attention": {"opgraft.ops": "MMEncoderAttention"},
    "vllm.config": {"opgraft": "CompilationMode"},
    "vllm.config.compilation": {"opgraft": "CompilationMode"},
    "vllm.distributed": {"opgraft.distributed": f"{_GROUPS} {_COLLECTIVES}"},
    "vllm.distributed.communication_op": {"opgraft.distributed": _COLLECTIVES},
    "vllm.distributed.parallel_state": {"opgraft.distributed": _GROUPS},
    "vllm.logger": {"opgraft.logger": "init_logger logger"},
    "vllm.model_executor.custom_op": {
        "opgraft.custom_op": "CustomOp PluggableLayer maybe_get_oot_by_class op_registry "
        "op_registry_oot"
    },
    "vllm.model_executor.layers.fused_moe": {_KERNELS: "FusedMoEConfig FusedMoEMethodBase"},
    "vllm.model_executor.layers.fused_moe.config": {_KERNELS: "FusedMoEConfig"},
    "vllm.model_executor.layers.fused_moe.fused_moe_method_base": {_KERNELS: "FusedMoEMethodBase"},
    "vllm.model_executor.layers.linear": {
        _KERNELS: "LinearMethodBase UnquantizedLinearMethod set_weight_attrs"
    },
    "vllm.model_executor.layers.quantization": {_KERNELS: "QuantizationConfig"},
    "vllm.model_executor.layers.quantization.base_config": {
        _KERNELS: "QuantizationConfig QuantizeMethodBase"
    },
    "vllm.model_executor.layers.vocab_parallel_embedding": {
        _KERNELS: "DEFAULT_VOCAB_PADDING_SIZE UnquantizedEmbeddingMethod "
        "get_masked_input_and_mask pad_vocab_size"
    },
    "vllm.model_executor.model_loader.weight_utils": {_KERNELS: "default_weight_loader"},
    "vllm.model_executor.utils": {_KERNELS: "set_weight_attrs"},
    "vllm.platforms": {"opgraft": "Platform current_platform"},
    "vllm.platforms.interface": {"opgraft": "Platform"},
    "vllm.sampling_params": {"opgraft": "SamplingParams"},
    "vllm.utils": {"opgraft": "direct_register_custom_op"},
    "vllm.utils.torch_utils": {"opgraft": "direct_register_custom_op"},
}
"""Module of vLLM → module of opgraft → the names that both have."""


def _counterparts() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for module, names in _OPS.items():
        found[f"vllm.model_executor.layers.{module}"] = dict.fromkeys(names.split(), "opgraft.ops")
    for module, homes in _OTHERS.items():
        for home, names in homes.items():
            found.setdefault(module, {}).update(dict.fromkeys(names.split(), home))
    return found


COUNTERPARTS: Mapping[str, Mapping[str, str]] = _counterparts()
"""Module of vLLM → name → the module of opgraft with that name."""

HINTS: Mapping[str, str] = {
    "vllm.config.get_current_vllm_config": "an op is given its settings by its constructor; those "
    "of opgraft are opgraft.OpgraftConfig",
    "vllm.config.VllmConfig": "settings are opgraft.OpgraftConfig; a platform changes them by "
    "default_config",
    "vllm.envs": "read variables of your own from os.environ; opgraft's settings are "
    "opgraft.OpgraftConfig",
    "vllm.forward_context": "the batch of a step is opgraft.ops.current_batch()",
    "vllm.model_executor.layers.layernorm.LayerNorm": "opgraft.ops.LayerNorm has the "
    "constructor of torch's",
    "vllm.platforms.PlatformEnum": "a platform of opgraft is told by its name",
    "vllm.platforms.interface.DeviceCapability": "opgraft.DeviceCapability has a name, dtypes and "
    "features",
    "vllm.platforms.DeviceCapability": "opgraft.DeviceCapability has a name, dtypes and features",
    "vllm.v1.attention": "a vendor's attention is a replacement of opgraft.ops.Attention or "
    "MLAAttention",
    "vllm.v1.core.sched": "a scheduler is a replacement of the class 'scheduler'",
    "vllm.v1.sample": "a sampler is a replacement of the class 'sampler'",
    "vllm.v1.worker": "a worker is a replacement of the class 'worker', a runner of 'model_runner'",
}
"""Qualified name without a counterpart → the next step, as a part of a message."""

PLATFORM: Mapping[str, str] = {
    "device_control_env_var": "visibility_variable",
    "device_name": "name",
    "device_type": "device_type",
    "dist_backend": "distributed_backend",
    "manual_seed_all": "manual_seed",
    "ray_device_key": "ray_device_key",
    "simple_compile_backend": "compile_backend",
}
"""Attribute of vLLM's ``Platform`` and ``current_platform`` → attribute of opgraft's."""


def home_of(module: str, name: str) -> str | None:
    """Return the module of opgraft with a name of vLLM's module, or None."""
    return COUNTERPARTS.get(module, {}).get(name)


def hint(qualified: str) -> str:
    """Return the next step for a name without a counterpart, or "" if no step is known.

    A hint for a module holds for all names in the module.
    """
    while qualified and qualified not in HINTS:
        qualified = qualified.rpartition(".")[0]
    return HINTS.get(qualified, "")
