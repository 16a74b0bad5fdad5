"""The latent attention of a decoder, made of the sizes in the config."""

from __future__ import annotations

from typing import Any

from opgraft.distributed import get_tensor_model_parallel_world_size
from opgraft.models.decoder_config import DecoderShape, LatentShape
from opgraft.ops.attention.latent import MLAModules, MultiHeadLatentAttentionWrapper
from opgraft.ops.layernorm import RMSNorm
from opgraft.ops.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from opgraft.ops.linear.quantization_config import QuantizationConfig
from opgraft.ops.linear.sharding import divide
from torch import nn

LATENT_EPS = 1e-6
"""The epsilon of norms of latents in every DeepSeek. The config's epsilon is for other norms."""


def latent_attention(
    shape: DecoderShape,
    latent: LatentShape,
    rope: nn.Module,
    quant_config: QuantizationConfig | None,
    prefix: str,
) -> MultiHeadLatentAttentionWrapper:
    """Make the attention of one layer, with this rank's part of the heads.

    Args:
        shape: the sizes of the decoder.
        latent: the sizes of the latents.
        rope: the rotary embedding. Layers may share one.
        quant_config: the quantization of the projections.
        prefix: the layer's path.

    Raises:
        LayerError: the ranks do not divide the heads.
    """
    ranks = get_tensor_model_parallel_world_size()
    # All heads read the same latents, so there are no key heads to share among ranks.
    heads = divide(shape.num_heads, ranks, f"latent attention {prefix!r}: the number of heads")
    linear: dict[str, Any] = {"quant_config": quant_config, "return_bias": False}
    # A key's part without rope and the value are both computed from the latent.
    expanded = shape.num_heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    kv_b_proj = ColumnParallelLinear(
        latent.kv_lora_rank, expanded, bias=False, prefix=f"{prefix}.kv_b_proj", **linear
    )
    o_proj = RowParallelLinear(
        shape.num_heads * latent.v_head_dim,
        shape.hidden_size,
        bias=shape.output_bias,
        prefix=f"{prefix}.o_proj",
        **linear,
    )
    modules = MLAModules(
        kv_a_layernorm=RMSNorm(latent.kv_lora_rank, eps=LATENT_EPS),
        kv_b_proj=kv_b_proj,
        rotary_emb=rope,
        o_proj=o_proj,
        **_input_modules(shape, latent, linear, prefix),
    )
    return MultiHeadLatentAttentionWrapper(
        shape.hidden_size,
        heads,
        shape.attention_scale,
        latent.qk_nope_head_dim,
        latent.qk_rope_head_dim,
        latent.v_head_dim,
        latent.q_lora_rank,
        latent.kv_lora_rank,
        modules,
        prefix=prefix,
    )


def _input_modules(
    shape: DecoderShape, latent: LatentShape, linear: dict[str, Any], prefix: str
) -> dict[str, Any]:
    """Return, by name, the modules between the hidden states and the queries and latents.

    There are other modules for queries with latents than for queries without.
    """
    hidden = shape.hidden_size
    rank = latent.q_lora_rank
    kv_size = latent.kv_lora_rank + latent.qk_rope_head_dim
    query_size = shape.num_heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
    if rank is None:
        q_proj = ColumnParallelLinear(
            hidden, query_size, bias=False, prefix=f"{prefix}.q_proj", **linear
        )
        name = "kv_a_proj_with_mqa"
        kv_a_proj = ReplicatedLinear(
            hidden, kv_size, bias=shape.qkv_bias, prefix=f"{prefix}.{name}", **linear
        )
        return {"q_proj": q_proj, name: kv_a_proj}
    name = "fused_qkv_a_proj"
    # Every rank has whole latents, as the norms of latents need all elements.
    fused = MergedColumnParallelLinear(
        hidden,
        [rank, kv_size],
        bias=shape.qkv_bias,
        prefix=f"{prefix}.{name}",
        disable_tp=True,
        **linear,
    )
    q_b_proj = ColumnParallelLinear(
        rank, query_size, bias=False, prefix=f"{prefix}.q_b_proj", **linear
    )
    return {name: fused, "q_a_layernorm": RMSNorm(rank, eps=LATENT_EPS), "q_b_proj": q_b_proj}
