"""The latent attention of a decoder: its sizes, read from the config, and the layer that is made of them."""

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
"""Of the norms of latents, which in every DeepSeek have this one, whatever the config says of the others."""


def latent_attention(
    shape: DecoderShape,
    latent: LatentShape,
    rope: nn.Module,
    quant_config: QuantizationConfig | None,
    prefix: str,
) -> MultiHeadLatentAttentionWrapper:
    """Make the attention of one layer, of whose heads each rank has a part.

    Args:
        shape: of the decoder.
        latent: of its attention.
        rope: the rotary embedding, which layers may share.
        quant_config: the quantization of the projections.
        prefix: the layer's path.

    Raises:
        LayerError: the ranks do not divide the heads.
    """
    ranks = get_tensor_model_parallel_world_size()
    heads = divide(shape.num_heads, ranks, f"latent attention {prefix!r}: the number of heads")
    linear: dict[str, Any] = {"quant_config": quant_config, "return_bias": False}
    expanded = shape.num_heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    modules = MLAModules(
        kv_a_layernorm=RMSNorm(latent.kv_lora_rank, eps=LATENT_EPS),
        kv_b_proj=ColumnParallelLinear(
            latent.kv_lora_rank, expanded, bias=False, prefix=f"{prefix}.kv_b_proj", **linear
        ),
        rotary_emb=rope,
        o_proj=RowParallelLinear(
            shape.num_heads * latent.v_head_dim,
            shape.hidden_size,
            bias=shape.output_bias,
            prefix=f"{prefix}.o_proj",
            **linear,
        ),
        **_queries(shape, latent, linear, prefix),
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


def _queries(
    shape: DecoderShape, latent: LatentShape, linear: dict[str, Any], prefix: str
) -> dict[str, Any]:
    """Make the modules that differ with the way in which queries come about, by their names."""
    hidden, rank = shape.hidden_size, latent.q_lora_rank
    rows = latent.kv_lora_rank + latent.qk_rope_head_dim
    width = shape.num_heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
    if rank is None:
        name = "kv_a_proj_with_mqa"
        return {
            "q_proj": ColumnParallelLinear(
                hidden, width, bias=False, prefix=f"{prefix}.q_proj", **linear
            ),
            name: ReplicatedLinear(
                hidden, rows, bias=shape.qkv_bias, prefix=f"{prefix}.{name}", **linear
            ),
        }
    name = "fused_qkv_a_proj"
    return {
        name: MergedColumnParallelLinear(
            hidden,
            [rank, rows],
            bias=shape.qkv_bias,
            prefix=f"{prefix}.{name}",
            disable_tp=True,
            **linear,
        ),
        "q_a_layernorm": RMSNorm(rank, eps=LATENT_EPS),
        "q_b_proj": ColumnParallelLinear(
            rank, width, bias=False, prefix=f"{prefix}.q_b_proj", **linear
        ),
    }
