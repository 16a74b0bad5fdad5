"""The layer of multi-head latent attention with all of its projections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from opgraft.binding.custom_op import CustomOp, PluggableLayer
from opgraft.errors import LayerError
from opgraft.ops.attention.latent.layers import MLAAttention, result_of
from opgraft.ops.checks import expect_last_dim
from torch import Tensor, nn

__all__ = ["MLAModules", "MultiHeadLatentAttentionWrapper"]


@dataclass(frozen=True)
class MLAModules:
    """The modules of a ``MultiHeadLatentAttentionWrapper``.

    Attributes:
        kv_a_layernorm: normalises latents.
        kv_b_proj: as for ``MLAAttention``.
        rotary_emb: rotates the latter parts of query heads and the shared key; ``None`` for a model
            without positions.
        o_proj: maps the values of all heads to the hidden size.
        fused_qkv_a_proj: maps hidden states to the latents of queries, the latents of keys and
            values, and the shared key.
        kv_a_proj_with_mqa: maps hidden states to the latents of keys and values, and the shared
            key, if queries have no latents.
        q_a_layernorm: normalises latents of queries.
        q_b_proj: maps latents of queries to query heads.
        q_proj: maps hidden states to query heads, if queries have no latents.
        indexer: of sparse attention, not written yet.
        is_sparse: likewise.
        topk_indices_buffer: likewise.
        indexer_rotary_emb: likewise.
        g_proj: maps hidden states to gates of the values.
    """

    kv_a_layernorm: nn.Module
    kv_b_proj: nn.Module
    rotary_emb: nn.Module | None
    o_proj: nn.Module
    fused_qkv_a_proj: nn.Module | None = None
    kv_a_proj_with_mqa: nn.Module | None = None
    q_a_layernorm: nn.Module | None = None
    q_b_proj: nn.Module | None = None
    q_proj: nn.Module | None = None
    indexer: nn.Module | None = None
    is_sparse: bool = False
    topk_indices_buffer: Tensor | None = None
    indexer_rotary_emb: nn.Module | None = None
    g_proj: nn.Module | None = None


@CustomOp.register("multi_head_latent_attention")
class MultiHeadLatentAttentionWrapper(PluggableLayer):
    """Multi-head latent attention with its projections.

    DeepSeek-AI, arXiv:2405.04434, section 2.1. The latent of a token is ``c = norm(W_dkv · h)``.
    Its queries are ``q = W_uq · norm(W_dq · h)`` or ``W_q · h``. Heads attend by
    ``softmax((q_nopeᵀ · W_uk · c + q_peᵀ · k_pe) · scale) · W_uv · c``, with a rope on ``q_pe`` and
    on the shared ``k_pe``.

    Args:
        hidden_size: elements of a hidden state.
        num_heads: query heads of this rank.
        scale: multiplies the scores.
        qk_nope_head_dim: elements of a query or key head that are not rotated.
        qk_rope_head_dim: rotated elements of a query or key head.
        v_head_dim: elements of a value head.
        q_lora_rank: elements of a latent of queries; ``None`` if queries have none.
        kv_lora_rank: elements of a latent of keys and values.
        mla_modules: the projections, norms and rope.
        cache_config: not read.
        quant_config: not read.
        prefix: the layer's path in its model.
        skip_topk: for sparse attention; not read.
        non_causal_multi_token_decode: must be ``False``.
        allow_short_prefill_indexer_scoring_skip: for sparse attention; not read.

    Raises:
        LayerError: a module for these sizes is missing, or attention would be sparse or not causal.
        ValueError: as ``MLAAttention``.
    """

    fused_qkv_a_proj: Any
    kv_a_proj_with_mqa: Any
    q_a_layernorm: Any
    q_b_proj: Any
    q_proj: Any
    kv_a_layernorm: Any
    kv_b_proj: Any
    rotary_emb: Any
    o_proj: Any
    g_proj: Any

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        scale: float,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        mla_modules: MLAModules,
        cache_config: object = None,
        quant_config: object = None,
        prefix: str = "",
        skip_topk: bool = False,
        non_causal_multi_token_decode: bool = False,
        allow_short_prefill_indexer_scoring_skip: bool = False,
    ) -> None:
        super().__init__()
        _expect_dense(prefix, mla_modules, non_causal_multi_token_decode)
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.qk_nope_head_dim = qk_nope_head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.qk_head_dim = qk_nope_head_dim + qk_rope_head_dim
        self.v_head_dim = v_head_dim
        self.q_lora_rank = q_lora_rank
        self.kv_lora_rank = kv_lora_rank
        self.prefix = prefix

        needed: tuple[str, ...] = ("kv_a_proj_with_mqa", "q_proj")
        if q_lora_rank is not None:
            needed = ("fused_qkv_a_proj", "q_a_layernorm", "q_b_proj")

        for name in (*needed, "kv_a_layernorm", "kv_b_proj", "rotary_emb", "o_proj", "g_proj"):
            module = getattr(mla_modules, name)
            if module is None and name in needed:
                raise LayerError(
                    f"latent attention {prefix!r}: {name} is None, and q_lora_rank is {q_lora_rank}"
                )
            self.add_module(name, module)

        self.mla_attn = MLAAttention(
            num_heads,
            scale,
            qk_nope_head_dim,
            qk_rope_head_dim,
            v_head_dim,
            q_lora_rank,
            kv_lora_rank,
            mla_modules.kv_b_proj,
            prefix=f"{prefix}.attn" if prefix else "attn",
        )

    def forward(
        self, positions: Tensor, hidden_states: Tensor, llama_4_scaling: Tensor | None = None
    ) -> Tensor:
        """Attend with ``hidden_states`` ``[tokens, hidden_size]``, and return the same shape.

        Args:
            positions: ``[tokens]``.
            hidden_states: of the tokens.
            llama_4_scaling: multiplies queries; broadcasts to
                ``[tokens, num_heads, qk_head_dim]``.

        Raises:
            ValueError: queries do not have ``num_heads · qk_head_dim`` elements.
        """
        query, latents = self._queries_and_latents(hidden_states)
        op = "multi_head_latent_attention"
        source = "what q_b_proj gives" if self.q_lora_rank else "what q_proj gives"
        expect_last_dim(op, source, query, self.num_heads * self.qk_head_dim)

        kv_c, k_pe = latents.tensor_split([self.kv_lora_rank], dim=-1)
        query = query.view(-1, self.num_heads, self.qk_head_dim)

        if self.rotary_emb is not None:
            q_nope, q_pe = query.tensor_split([self.qk_nope_head_dim], dim=-1)
            q_pe, k_pe = self.rotary_emb(positions, q_pe, k_pe.unsqueeze(1))
            query = torch.cat((q_nope, q_pe), dim=-1)

        if llama_4_scaling is not None:
            query = query * llama_4_scaling
        attended = self.mla_attn(query, self.kv_a_layernorm(kv_c), k_pe)
        if self.g_proj is not None:
            gates = result_of(self.g_proj(hidden_states)).sigmoid()
            attended = attended * gates
        return result_of(self.o_proj(attended))

    def _queries_and_latents(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return query heads ``[tokens, num_heads · qk_head_dim]``, and latents.

        Each row of latents has the shared key behind the latent.
        """
        if self.q_lora_rank is None:
            query = result_of(self.q_proj(hidden_states))
            latents = result_of(self.kv_a_proj_with_mqa(hidden_states))
            return query, latents

        both = result_of(self.fused_qkv_a_proj(hidden_states))
        q_c, latents = both.tensor_split([self.q_lora_rank], dim=-1)
        query = result_of(self.q_b_proj(self.q_a_layernorm(q_c)))
        return query, latents


def _expect_dense(prefix: str, modules: MLAModules, non_causal: bool) -> None:
    """Raise ``LayerError`` for sparse or non-causal attention, not written yet."""
    if not isinstance(modules, MLAModules):
        raise LayerError(
            f"latent attention {prefix!r}: mla_modules is {modules!r}, expected an MLAModules"
        )
    if modules.is_sparse or modules.indexer is not None or non_causal:
        kind = "not causal" if non_causal else "sparse"
        raise LayerError(
            f"latent attention {prefix!r} is to be {kind}, which is not written: a plugin brings "
            "it by a replacement of MultiHeadLatentAttentionWrapper"
        )
