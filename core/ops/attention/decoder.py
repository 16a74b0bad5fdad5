"""The attention layer of decoders, with keys and values in pages of a cache."""

from __future__ import annotations

import math
from typing import Any

import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.derivation import NATIVE, calls_functional
from opgraft.errors import LayerError
from opgraft.ops.attention.batch import AttentionBatch, LayerPages, current_batch
from opgraft.ops.attention.cached import CachedAttention
from opgraft.ops.attention.codes import row_size
from opgraft.ops.attention.functional import expect_kv_heads
from opgraft.ops.attention.modules import ScaledDotProductAttention
from opgraft.ops.attention.node import as_node
from opgraft.ops.attention.paged import attend_stepwise, visible_keys
from opgraft.ops.checks import (
    expect_floating,
    expect_positive,
    expect_same_device,
    expect_same_dtype,
    expect_size,
)
from opgraft.ops.on_triton import on_triton
from opgraft.ops.prefixes import claim_prefix
from opgraft.registry.op_classes import definer
from torch import Tensor, nn
from torch.compiler import is_compiling

__all__ = ["Attention", "PagedAttention", "WriteKVCache"]

TRITON = on_triton("opgraft.ops.attention.triton")


@CustomOp.register("write_kv_cache")
class WriteKVCache(CustomOp):
    """Writes the keys and values of new tokens to their places in a paged cache.

    Kwon et al., arXiv:2309.06180.
    """

    @calls_functional
    def forward_native(
        self, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor, *, functional: Any = NATIVE
    ) -> None:
        """Write; see ``opgraft.functional.write_kv_cache`` for arguments and errors."""
        functional.write_kv_cache(key, value, cache, slots)

    # Makes forward_cuda and forward_xpu.
    functional_cuda = functional_xpu = TRITON


@CustomOp.register("paged_attention")
class PagedAttention(CustomOp):
    """Causal attention over keys and values in pages (Kwon et al., arXiv:2309.06180).

    Args:
        scale: multiplies the scores.
        sliding_window: tokens in the view of a token, itself included; by default all so far.
        logits_soft_cap: bound of the scores; by default none.
    """

    def __init__(
        self, scale: float, sliding_window: int | None = None, logits_soft_cap: float | None = None
    ) -> None:
        super().__init__()
        self.scale = scale
        self.sliding_window = sliding_window
        self.logits_soft_cap = logits_soft_cap

    @calls_functional
    def forward_native(
        self,
        query: Tensor,
        cache: Tensor,
        block_table: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        sinks: Tensor | None = None,
        *,
        functional: Any = NATIVE,
    ) -> Tensor:
        """Attend; see ``opgraft.functional.paged_attention`` for arguments and errors."""
        attended: Tensor = functional.paged_attention(
            query,
            cache,
            block_table,
            query_start_loc,
            seq_lens,
            self.scale,
            self.sliding_window,
            self.logits_soft_cap,
            sinks,
        )
        return attended

    # Makes forward_cuda and forward_xpu.
    functional_cuda = functional_xpu = TRITON

    def extra_repr(self) -> str:
        return (
            f"scale={self.scale}, sliding_window={self.sliding_window}, "
            f"logits_soft_cap={self.logits_soft_cap}"
        )


@CustomOp.register("attention")
class Attention(CachedAttention):
    """Causal attention over the tokens of a sequence so far.

    Computes ``softmax(cap(Q · Kᵀ · scale) + mask) · V`` (Vaswani et al., arXiv:1706.03762). Each
    key head serves ``num_heads / num_kv_heads`` query heads (arXiv:2305.13245). With a window, a
    token sees itself and the ``sliding_window - 1`` tokens before (arXiv:2004.05150). A cap bounds
    scores as ``cap · tanh(score / cap)`` (arXiv:2408.00118). A sink is one more score per head: the
    sink takes a share of the softmax and has no value (arXiv:2309.17453).

    The current ``AttentionBatch`` holds the sequences, and the pages of this layer under its
    ``prefix``. Without a batch, all tokens are one sequence and nothing is kept. A replacement may
    choose any layout of its cache: nothing else looks inside a block.

    Args:
        num_heads: query heads of this rank.
        head_size: elements of a head.
        scale: multiplies the scores.
        num_kv_heads: key and value heads of this rank, a divisor of ``num_heads``; by default
            ``num_heads``.
        sliding_window: tokens in the view of a token, itself included; by default all so far.
        logits_soft_cap: bound of the scores; by default none.
        sinks: one score per query head, ``[num_heads]``. A parameter becomes one of the layer, too.
        prefix: the layer's path in its model, and the key of its pages.

    Raises:
        ValueError: a number of heads, a size or a window is no positive integer; ``num_kv_heads``
            does not divide ``num_heads``; the scale or the cap is no finite number; the cap is not
            positive; or ``sinks`` has another shape.
    """

    sinks: Tensor | None

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
        sinks: Tensor | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads

        expect_size("attention", "num_heads", num_heads)
        expect_size("attention", "num_kv_heads", self.num_kv_heads)
        expect_kv_heads(num_heads, self.num_kv_heads, op="attention")
        _expect_settings(head_size, scale, sliding_window, logits_soft_cap)

        if sinks is not None and tuple(sinks.shape) != (num_heads,):
            raise ValueError(
                f"attention: sinks has shape {tuple(sinks.shape)}, expected one per head, "
                f"({num_heads},)"
            )

        self.head_size = head_size
        self.scale = scale
        self.sliding_window = sliding_window
        self.logits_soft_cap = logits_soft_cap

        # A plain tensor moves with the layer, too, but is not saved.
        if sinks is None or isinstance(sinks, nn.Parameter):
            self.sinks = sinks
        else:
            self.register_buffer("sinks", sinks, persistent=False)

        self.prefix = self.layer_name = prefix
        claim_prefix(prefix, self)
        self.attend = ScaledDotProductAttention()
        self.write = WriteKVCache()
        self.attend_pages = PagedAttention(scale, sliding_window, logits_soft_cap)

    def kv_cache_shape(
        self, num_blocks: int, block_size: int, dtype: torch.dtype | None = None
    ) -> tuple[int, ...]:
        """Return the shape of a cache. Only this layer looks inside a block.

        Args:
            num_blocks: the first dimension.
            block_size: tokens in a block.
            dtype: ``torch.int8`` for a cache of such codes, ``torch.uint8`` for codes of fp8 e4m3,
                each with their scales. Not given if the cache has the layer's own dtype: a
                replacement without a layout for codes leaves the parameter out, see
                ``holds_codes``.

        Raises:
            LayerError: from a replacement without a layout for ``dtype``.
        """
        size = row_size(self.head_size, dtype)
        return (num_blocks, 2, self.num_kv_heads, block_size, size)

    @property
    def num_queries_per_kv(self) -> int:
        """The query heads that share a key head."""
        return self.num_heads // self.num_kv_heads

    def holds_codes(self) -> bool:
        """Return True if ``kv_cache_shape`` takes a ``dtype``, for a cache of codes.

        A replacement with a layout of its own overrides this if its layout has a place for codes.
        """
        return definer(type(self), "kv_cache_shape") is Attention

    def idle(self) -> frozenset[str]:
        if current_batch() is not None:
            return frozenset({"attend"})
        if self._is_plain:
            return frozenset({"write", "attend_pages"})
        return frozenset({"write", "attend_pages", "attend"})

    @property
    def _is_plain(self) -> bool:
        """Torch's own attention can compute the layer."""
        return self.logits_soft_cap is None and self.sinks is None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attended values, and write the new keys and values to the cache.

        Args:
            query: ``[tokens, num_heads · head_size]`` or ``[tokens, num_heads, head_size]``.
            key: the same with ``num_kv_heads``.
            value: as ``key``.

        Returns:
            The attended values, in the shape of ``query``.

        Raises:
            ValueError: a shape, a dtype or a device does not fit.
            LayerError: the batch has another number of tokens, no pages for the layer, or pages of
                another shape.
        """
        if self.is_node and is_compiling():
            return as_node(query, key, value, self.prefix)

        q, k, v = self._heads(query, key, value)
        batch = current_batch()
        if batch is None:
            attended = self._attend_within(q, k, v)
        else:
            pages = self.pages(batch, len(q))
            attended = self.attend_batch(batch, pages, q, k, v)
        return attended.reshape(query.shape)

    def _heads(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """View the arguments as ``[tokens, heads, head_size]``."""
        tokens = query.shape[:1]
        return [
            self._viewed("query", query, self.num_heads, tokens),
            self._viewed("key", key, self.num_kv_heads, tokens),
            self._viewed("value", value, self.num_kv_heads, tokens),
        ]

    def _viewed(self, name: str, x: Tensor, heads: int, tokens: tuple[int, ...]) -> Tensor:
        size = self.head_size
        shape = x.shape
        if tokens and shape in ((*tokens, heads * size), (*tokens, heads, size)):
            return x.reshape(tokens[0], heads, size)

        count = tokens[0] if tokens else "tokens"
        raise ValueError(
            f"attention: {name} has shape {tuple(shape)}, expected [{count}, {heads} · {size}] or "
            f"[{count}, {heads}, {size}]"
        )

    def attend_batch(
        self, batch: AttentionBatch, pages: LayerPages, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Write new tokens to the pages and attend over them, as ``[tokens, heads, head_size]``.

        A replacement with a ``kv_cache_shape`` of its own overrides this.
        """
        self.write(key, value, pages.cache, pages.slots)
        attended: Tensor = self.attend_pages(
            query, pages.cache, pages.block_table, batch.query_start_loc, batch.seq_lens, self.sinks
        )
        return attended

    def _attend_within(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend within one sequence over ``[tokens, heads, head_size]``."""
        tokens = query.shape[0]
        window = self.sliding_window
        query = query.transpose(0, 1)
        key = key.transpose(0, 1)
        value = value.transpose(0, 1)
        mask = None

        # Torch's causal attention needs no mask if the window reaches over all tokens.
        if tokens > 1 and not (self._is_plain and (window is None or tokens <= window)):
            positions = torch.arange(tokens, device=query.device)
            mask = visible_keys(positions, positions, window)
        if self._is_plain:
            attended = self.attend(
                query[None],
                key[None],
                value[None],
                mask,
                0.0,
                mask is None and tokens > 1,
                scale=self.scale,
                enable_gqa=self.num_kv_heads != self.num_heads,
            )
            return attended[0].transpose(0, 1)

        # The op for plain attention has checks of its own.
        expect_floating("attention", "query", query)
        for name, x in (("key", key), ("value", value)):
            expect_same_dtype("attention", name, x, "query", query)
            expect_same_device("attention", name, x, "query", query)

        attended = attend_stepwise(
            query, key, value, mask, self.scale, self.logits_soft_cap, self.sinks
        )
        return attended.transpose(0, 1)

    def extra_repr(self) -> str:
        return (
            f"{self.num_heads}, {self.head_size}, scale={self.scale}, "
            f"num_kv_heads={self.num_kv_heads}"
        )


def _expect_settings(head_size: int, scale: float, window: int | None, cap: float | None) -> None:
    """Raise ``ValueError`` if no layer can have these settings."""
    for name, value in (("head_size", head_size), ("sliding_window", window)):
        if value is not None:
            expect_size("attention", name, value)
            expect_positive("attention", name, value)

    for name, number in (("scale", scale), ("logits_soft_cap", 1.0 if cap is None else cap)):
        if not isinstance(number, (int, float)) or not math.isfinite(number):
            raise ValueError(f"attention: {name} is {number!r}, expected a finite number")

    if cap is not None:
        expect_positive("attention", "logits_soft_cap", cap)


def attention_layers(model: nn.Module) -> dict[str, CachedAttention]:
    """Return the attention layers of a model by prefix, the key of their pages.

    Raises:
        LayerError: two layers have one prefix, and so would have one cache.
    """
    layers: dict[str, CachedAttention] = {}
    for path, layer in model.named_modules():
        if not isinstance(layer, CachedAttention):
            continue
        first = layers.setdefault(layer.prefix, layer)
        if first is not layer:
            raise LayerError(
                f"the attention layer {path!r} has the prefix {layer.prefix!r}, as another one of "
                "the model has: both would write to one cache. Give each layer its path as prefix"
            )
    return layers
