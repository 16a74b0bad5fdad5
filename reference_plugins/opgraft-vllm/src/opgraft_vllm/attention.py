"""Attention of decoders: a backend that replaces vLLM's own for CPUs.

A layer uses the memory of vLLM's cache in the layout of opgraft's kernel. This works because vLLM
moves whole blocks only.
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
    """A layer of attention. If opgraft's kernel lacks a feature of the layer, vLLM's kernel runs.

    Attributes:
        attention: opgraft's layer, or None if vLLM's kernel runs.
        row: the row of the report that counts calls.
    """

    row: Row

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        note_layer()
        self.attention: Any = None
        if not self._can_be_served():
            REPORT.leave("attention", "layers with a feature that opgraft's kernel lacks")
            return
        self.attention = ops.Attention(
            self.num_heads,
            self.head_size,
            self.scale,
            self.num_kv_heads,
            self.sliding_window if self.sliding_window > 0 else None,
            self.logits_soft_cap or None,
        )

    def _can_be_served(self) -> bool:
        """Return True if opgraft's kernel has all features of the layer."""
        if self.attn_type != AttentionType.DECODER or self.kv_cache_dtype != "auto":
            return False
        if self.alibi_slopes is not None or self.sinks is not None:
            return False
        # Layers that share a cache would need one layout for all of them.
        config = get_current_vllm_config()
        model = config.model_config
        text = getattr(model, "hf_text_config", None)
        shares = getattr(text, "num_kv_shared_layers", 0) or config.speculative_config
        if shares or self.kv_sharing_target_layer_name is not None:
            return False
        return not getattr(model, "is_mm_prefix_lm", False)

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
        """Write new keys and values to the cache, attend, and return ``output``."""
        # There is no metadata while vLLM warms up.
        if attn_metadata is None:
            return output
        if self.attention is None:
            # vLLM leaves the write to the backend, because of forward_includes_kv_cache_update.
            if key is not None and self.kv_sharing_target_layer_name is None:
                self.do_kv_cache_update(layer, key, value, kv_cache, attn_metadata.slot_mapping)
            rest = (output, output_scale, output_block_scale)
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
        num_blocks, _, block_size = kv_cache.shape[:3]
        batch = AttentionBatch(
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            attn_metadata.max_query_len,
            attn_metadata.max_seq_len,
            {},
            block_size,
        )
        # vLLM pads the batch: the rows behind the actual tokens are unused.
        tokens = attn_metadata.num_actual_tokens
        shape = self.attention.kv_cache_shape(num_blocks, block_size)
        slots = attn_metadata.slot_mapping[:tokens]
        pages = LayerPages(kv_cache.view(shape), attn_metadata.block_table, slots)
        new = (query[:tokens], key[:tokens], value[:tokens])  # type: ignore[index]
        self.row.count()
        output[:tokens] = self.attention.attend_batch(batch, pages, *new)
        return output


class OpgraftBackend(CPUAttentionBackend):  # type: ignore[misc]
    """vLLM's backend for CPUs, with the layers above."""

    # The kernel writes new keys and values itself, which saves vLLM a call.
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_impl_cls() -> type[OpgraftAttention]:
        """Return the class of layers."""
        return OpgraftAttention


def replace_attention() -> None:
    """Replace the backend, if a plugin of opgraft has its own kernel for attention."""
    layer: Any = ops.Attention(1, 16, 1.0)
    kernel = type(layer).attend_batch
    # No plugin has replaced opgraft's definition, so vLLM keeps its own kernel.
    if kernel is ops.Attention.attend_batch:
        return
    if AttentionBackendEnum.CPU_ATTN.is_overridden():
        REPORT.leave("attention", "another plugin of vLLM replaces the backend")
        return
    OpgraftAttention.row = noted("attention", kernel.__qualname__, layer.binding.provider)
    OpgraftAttention.row.told["classes"].append(CPUAttentionBackend.__name__)
    path = f"{OpgraftBackend.__module__}.{OpgraftBackend.__qualname__}"
    register_backend(AttentionBackendEnum.CPU_ATTN, path)
