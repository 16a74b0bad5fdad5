"""The current batch, for layers of a plugin: ``vllm.forward_context``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from opgraft.errors import LayerError
from opgraft.ops import AttentionBatch, LayerPages, current_batch

from opgraft_vllm_bridge.vllm_parts.config import LAYERS, CUDAGraphMode


@dataclass
class CommonAttentionMetadata:
    """The sequences of a batch, and the places of their keys and values in the cache of one layer.

    Plugins may derive from this class.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool = True

    @property
    def query_start_loc_cpu(self) -> torch.Tensor:
        return self.query_start_loc.cpu()

    def naive_query_lens(self) -> torch.Tensor:
        """Return the number of new tokens of each sequence."""
        return self.query_start_loc[1:] - self.query_start_loc[:-1]


@dataclass(frozen=True)
class ForwardContext:
    """The current batch.

    Attributes:
        attn_metadata: prefix of an attention layer with a cache → ``CommonAttentionMetadata``.
            Within ``set_forward_context``, the object of the plugin.
        slot_mapping: prefix of such a layer → the slots of the new tokens in the cache.
    """

    attn_metadata: Any
    slot_mapping: Any
    cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE

    @property
    def no_compile_layers(self) -> dict[str, Any]:
        """The layers that plugins have put into ``static_forward_context``."""
        return LAYERS


_GIVEN: ContextVar[ForwardContext | None] = ContextVar("opgraft_vllm_bridge_context", default=None)
"""The context that a plugin has set by ``set_forward_context``, or None."""


@contextmanager
def set_forward_context(
    attn_metadata: Any,
    vllm_config: Any,
    num_tokens: int | None = None,
    num_tokens_across_dp: torch.Tensor | None = None,
    cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    batch_descriptor: Any = None,
    ubatch_slices: Any = None,
    slot_mapping: Any = None,
    skip_compiled: bool = False,
    is_padding: torch.Tensor | None = None,
) -> Iterator[None]:
    """Within the block, let ``get_forward_context`` return this metadata.

    Layers of opgraft still read opgraft's own batch.
    """
    context = ForwardContext(attn_metadata, slot_mapping or {}, cudagraph_runtime_mode)
    token = _GIVEN.set(context)
    try:
        yield
    finally:
        _GIVEN.reset(token)


def is_forward_context_available() -> bool:
    """Return True while a batch is computed."""
    return _GIVEN.get() is not None or current_batch() is not None


def get_forward_context() -> ForwardContext:
    """Return the current batch.

    Raises:
        LayerError: no batch is computed now.
    """
    given = _GIVEN.get()
    if given is not None:
        return given
    batch = current_batch()
    if batch is None:
        raise LayerError("no batch is computed: ask is_forward_context_available() first")
    metadata = {prefix: _metadata(batch, pages) for prefix, pages in batch.pages.items()}
    slots = {prefix: pages.slots for prefix, pages in batch.pages.items()}
    return ForwardContext(metadata, slots)


def _metadata(batch: AttentionBatch, pages: LayerPages) -> CommonAttentionMetadata:
    return CommonAttentionMetadata(
        query_start_loc=batch.query_start_loc,
        seq_lens=batch.seq_lens,
        num_reqs=len(batch.seq_lens),
        num_actual_tokens=len(pages.slots),
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
        block_table_tensor=pages.block_table,
        slot_mapping=pages.slots,
    )
