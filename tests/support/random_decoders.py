"""Small decoders with random weights, a case for each way in which families differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.plamo2 import plamo2

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
OF_CPU_KERNELS = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "vocab_size": 400,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
"""Sizes for which the CPU kernels' plan computes all layers."""

GEMMA = {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 24}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GRANITE = {
    "embedding_multiplier": 12.0,
    "logits_scaling": 0.5,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.11,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 3,
}
DEEPSEEK_EXPERTS = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
}
DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.9,
}
ROUTED = {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 16}
YARN_UNTRUNCATED = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama 3, with biases, tied": (
        "Llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": LLAMA3,
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 5, "head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "phi3": ("Phi3", {}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": ("Gemma2", GEMMA),
    "gemma3": (
        "Gemma3",
        {**GEMMA, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "granite": ("Granite", GRANITE),
    "olmo2": ("Olmo2", {}),
    "deepseek v2": ("DeepseekV2", LATENT),
    "deepseek v3, with latent queries and yarn": (
        "DeepseekV3",
        {**LATENT, "q_lora_rank": 20, "attention_bias": True, "rope_parameters": DEEPSEEK_YARN},
    ),
    "deepseek v2, with experts": (
        "DeepseekV2",
        {
            **LATENT,
            **DEEPSEEK_EXPERTS,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.7,
        },
    ),
    "deepseek v3, with experts": (
        "DeepseekV3",
        {**LATENT, **DEEPSEEK_EXPERTS, "q_lora_rank": 20, "first_k_dense_replace": 2},
    ),
    "deepseek v3, halves rotated": (
        "DeepseekV3",
        {**LATENT, "rope_interleave": False, "v_head_dim": 24},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 5}),
    "qwen3_moe": (
        "Qwen3Moe",
        {**ROUTED, "moe_intermediate_size": 24, "mlp_only_layers": [1], "norm_topk_prob": True},
    ),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 3}),
    "gpt_oss": ("GptOss", {**ROUTED, "sliding_window": 5, "rope_parameters": YARN_UNTRUNCATED}),
}


def written(family: str, folder: Path, **values: Any) -> Any:
    """A model of transformers with random weights, whose checkpoint is in ``folder``."""
    config_class = getattr(
        transformers, "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    )
    config = config_class(**{**SIZES, "num_key_value_heads": 2, **values})
    return saved(getattr(transformers, f"{family}ForCausalLM")(config), folder)


def saved(model: Any, folder: Path) -> Any:
    generator = torch.Generator().manual_seed(len(folder.name))
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
    model.tie_weights()
    model.save_pretrained(folder)
    return model.eval()


THROUGH_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "apertus": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "gpt_neox": {},
    "smollm3": {},
    "starcoder2": {"sliding_window": 5},
    "cohere2": {
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
}
"""Decoders that are not written, by the ``model_type`` of transformers."""

_MOE = {"num_experts_per_tok": 2, "norm_topk_prob": True}
STACKED_EXPERTS: dict[str, dict[str, Any]] = {
    "ernie4_5_moe": _MOE
    | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 0},
    "flex_olmo": _MOE | {"num_experts": 4},
    "glm4_moe": _MOE
    | {
        "n_routed_experts": 4,
        "moe_intermediate_size": 24,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 0,
    },
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "minimax_m2": _MOE | {"num_local_experts": 4, "rotary_dim": 8},
    "phimoe": _MOE | {"num_local_experts": 4},
    "qwen2_moe": _MOE
    | {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
}
"""Families with experts that transformers stacks when it loads."""


def through_transformers(kind: str, folder: Path, **more: Any) -> Any:
    """A model of transformers that none of the written families is, whose checkpoint is in ``folder``."""
    values = {
        **SIZES,
        "num_key_value_heads": 2,
        "head_dim": 12,
        **(THROUGH_TRANSFORMERS | STACKED_EXPERTS)[kind],
        **more,
    }
    config = transformers.AutoConfig.for_model(kind, **values)
    return saved(transformers.AutoModelForCausalLM.from_config(config), folder)


HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba": (
        "Bamba",
        {
            "num_key_value_heads": 2,
            "attn_layer_indices": [1],
            "mamba_n_heads": 6,
            "mamba_n_groups": 2,
            "mamba_d_state": 5,
            "mamba_chunk_size": 4,
            "attention_bias": True,
            "mamba_proj_bias": True,
        },
    ),
    "lfm2": (
        "Lfm2",
        {
            "num_key_value_heads": 2,
            "layer_types": ["conv", "full_attention", "conv"],
            "block_multiple_of": 8,
            "conv_bias": True,
        },
    ),
    "mamba": ("Mamba", {"state_size": 5, "time_step_rank": 4, "use_bias": True}),
    "mamba2": (
        "Mamba2",
        {
            "state_size": 6,
            "num_heads": 6,
            "head_dim": 16,
            "n_groups": 2,
            "chunk_size": 4,
            "tie_word_embeddings": True,
        },
    ),
    "plamo2": ("Plamo2", {}),
}
"""Decoders whose layers carry a state."""


def hybrid(name: str, folder: Path, **more: Any) -> Any:
    """A model of transformers, or of ``plamo2``, with layers that carry a state; its checkpoint is in ``folder``."""
    family, values = HYBRIDS[name]
    if family == "Plamo2":
        return plamo2(folder, **values, **more)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **values, **more})
    return saved(getattr(transformers, f"{family}ForCausalLM")(config), folder)
