"""Attention of decoders: a backend in the place of vLLM's own for CPUs.

A kernel of opgraft may lay out a block as it likes. vLLM moves whole blocks only, so a layer uses
the memory of vLLM's cache in its own layout.
"""

from __future__ import annotations

from typing import Any

from opgraft import ops
from opgraft.ops import AttentionBatch, LayerPages
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from opgraft_vllm.operators import noted
from opgraft_vllm.replacing import note_layer
from opgraft_vllm.report import REPORT, Row


class OpgraftAttention(CPUAttentionBackendImpl):  # type: ignore[misc]
    """A layer of attention. If ``_can_be_served`` is False, vLLM's kernel runs.

    Attributes:
        attention: opgraft's layer, or ``None``.
        row: of the report.
    """

    row: Row

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        note_layer()
        self.attention: Any = None
        if self._can_be_served():
            self.attention = ops.Attention(
                self.num_heads,
                self.head_size,
                self.scale,
                self.num_kv_heads,
                self.sliding_window if self.sliding_window > 0 else None,
                self.logits_soft_cap or None,
            )
        else:
            REPORT.leave("attention", "layers with a feature that opgraft's kernel lacks")

    def _can_be_served(self) -> bool:
        config = get_current_vllm_config()
        model = config.model_config
        text = getattr(model, "hf_text_config", None)
        # Layers that share a cache would need one layout for all of them.
        shares = getattr(text, "num_kv_shared_layers", 0) or config.speculative_config
        return (
            self.attn_type == AttentionType.DECODER
            and self.kv_cache_dtype == "auto"
            and self.alibi_slopes is None
            and self.sinks is None
            and self.kv_sharing_target_layer_name is None
            and not shares
            and not getattr(model, "is_mm_prefix_lm", False)
        )

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write new keys and values, and attend."""
        # vLLM warms up.
        if attn_metadata is None:
            return output
        if self.attention is None:
            if key is not None and self.kv_sharing_target_layer_name is None:
                self.do_kv_cache_update(layer, key, value, kv_cache, attn_metadata.slot_mapping)
            rest = output, output_scale, output_block_scale
            result: Tensor = super().forward(
                layer, query, key, value, kv_cache, attn_metadata, *rest
            )
            return result
        is_causal = attn_metadata.causal and attn_metadata.dynamic_causal is None
        if output_scale is not None or output_block_scale is not None or not is_causal:
            # The cache has opgraft's layout, so vLLM's kernel cannot compute this call.
            raise NotImplementedError(
                "opgraft's attention is causal and returns no quantized values: leave "
                "'opgraft' out of VLLM_PLUGINS"
            )
        tokens = attn_metadata.num_actual_tokens
        batch = AttentionBatch(
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            attn_metadata.max_query_len,
            attn_metadata.max_seq_len,
            {},
            kv_cache.shape[2],
        )
        shape = self.attention.kv_cache_shape(kv_cache.shape[0], kv_cache.shape[2])
        pages = LayerPages(
            kv_cache.view(shape), attn_metadata.block_table, attn_metadata.slot_mapping[:tokens]
        )
        self.row.count()
        new = query[:tokens], key[:tokens], value[:tokens]  # type: ignore[index]
        output[:tokens] = self.attention.attend_batch(batch, pages, *new)
        return output


class OpgraftBackend(CPUAttentionBackend):  # type: ignore[misc]
    """vLLM's backend with these layers."""

    # The kernel writes new keys and values itself, which saves vLLM a call.
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_impl_cls() -> type[OpgraftAttention]:
        return OpgraftAttention


def replace_attention() -> None:
    """Replace the backend, if a plugin of opgraft attends by its own kernel."""
    layer: Any = ops.Attention(1, 16, 1.0)
    kernel = type(layer).attend_batch
    if kernel is ops.Attention.attend_batch:
        return
    if AttentionBackendEnum.CPU_ATTN.is_overridden():
        REPORT.leave("attention", "another plugin of vLLM replaces the backend")
        return
    OpgraftAttention.row = noted("attention", kernel.__qualname__, layer.binding.provider)
    OpgraftAttention.row.told["classes"].append(CPUAttentionBackend.__name__)
    path = f"{OpgraftBackend.__module__}.{OpgraftBackend.__qualname__}"
    register_backend(AttentionBackendEnum.CPU_ATTN, path)
