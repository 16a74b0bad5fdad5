"""The attention layer of decoders, which keeps keys and values in a cache."""

from __future__ import annotations

import math

import torch
from opgraft.binding.custom_op import CustomOp, PluggableLayer
from opgraft.errors import LayerError
from opgraft.ops.attention.batch import AttentionBatch, current_batch
from opgraft.ops.attention.functional import expect_kv_heads
from opgraft.ops.attention.modules import ScaledDotProductAttention
from opgraft.ops.checks import (
    expect_floating,
    expect_positive,
    expect_same_device,
    expect_same_dtype,
    expect_size,
)
from opgraft.ops.precision import compute_dtype
from opgraft.ops.prefixes import claim_prefix
from torch import Tensor, nn


@CustomOp.register("attention")
class Attention(PluggableLayer):
    """Causal attention over the tokens of a sequence so far, ``softmax(cap(Q · Kᵀ · scale) + mask) · V``.

    Vaswani et al., arXiv:1706.03762. Each key head serves ``num_heads / num_kv_heads`` query heads (arXiv:2305.13245);
    a window lets a token see itself and the ``sliding_window - 1`` tokens before it (arXiv:2004.05150); a cap bounds
    scores as ``cap · tanh(score / cap)`` (arXiv:2408.00118); a sink is one more score per head, which takes a share of
    the softmax and has no value (arXiv:2309.17453).

    The sequences, and the cache of this layer under its ``prefix``, are those of the current ``AttentionBatch``. Where
    there is none, all tokens are one sequence and nothing is kept.

    Args:
        num_heads: query heads of this rank.
        head_size: elements of a head.
        scale: multiplies the scores.
        num_kv_heads: key and value heads of this rank, a divisor of ``num_heads``; ``num_heads`` if not given.
        sliding_window: tokens that a token sees, with itself; all so far if not given.
        logits_soft_cap: bound of the scores; none if not given.
        sinks: one score per query head, ``[num_heads]``. A parameter becomes one of the layer, too.
        prefix: the layer's path in its model, under which its cache is found.

    Raises:
        ValueError: a number of heads, a size or a window is no positive integer, ``num_kv_heads`` does not divide
            ``num_heads``, the scale or the cap is no finite number, the cap is not positive, or ``sinks`` has another
            shape.
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
            raise ValueError(f"attention: sinks has shape {tuple(sinks.shape)}, expected one per head, ({num_heads},)")
        self.head_size = head_size
        self.scale = scale
        self.sliding_window = sliding_window
        self.logits_soft_cap = logits_soft_cap
        if sinks is None or isinstance(sinks, nn.Parameter):
            self.sinks = sinks
        else:
            self.register_buffer("sinks", sinks, persistent=False)
        self.prefix = self.layer_name = prefix
        claim_prefix(prefix, self)
        self.attend = ScaledDotProductAttention()

    def kv_cache_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Return the shape of a cache of ``num_blocks`` blocks; only this layer looks inside a block."""
        return (num_blocks, 2, self.num_kv_heads, block_size, self.head_size)

    def cache_length(self, batch: AttentionBatch) -> int | None:
        """Return for how many tokens of a sequence its row of the cache has room; ``None`` if there is no cache."""
        cache = batch.caches.get(self.prefix)
        return None if cache is None else cache.shape[3]

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attended values, in the shape of ``query``; the new keys and values go to the cache.

        Args:
            query: ``[tokens, num_heads · head_size]`` or ``[tokens, num_heads, head_size]``.
            key: the same with ``num_kv_heads``.
            value: as ``key``.

        Raises:
            ValueError: a shape, a dtype or a device does not fit.
            LayerError: the batch has another number of tokens, no cache for the layer or one of another kind, or no
                room in it.
        """
        q, k, v = self._heads(query, key, value)
        batch = current_batch()
        attended = self._attend(q, k, v) if batch is None else self._attend_batch(batch, q, k, v)
        return attended.transpose(0, 1).reshape(query.shape)

    def _heads(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """View the arguments as ``[heads, tokens, head_size]``."""
        given = {"query": (query, self.num_heads), "key": (key, self.num_kv_heads), "value": (value, self.num_kv_heads)}
        tokens = query.shape[:1]
        count = tokens[0] if tokens else "tokens"
        for name, (x, heads) in given.items():
            if (
                not x.dim()
                or x.shape[:1] != tokens
                or tuple(x.shape[1:])
                not in (
                    (heads * self.head_size,),
                    (heads, self.head_size),
                )
            ):
                raise ValueError(
                    f"attention: {name} has shape {tuple(x.shape)}, expected [{count}, {heads} · {self.head_size}] or "
                    f"[{count}, {heads}, {self.head_size}]"
                )
        return [x.reshape(-1, heads, self.head_size).transpose(0, 1) for x, heads in given.values()]

    def _attend_batch(self, batch: AttentionBatch, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend over ``[heads, tokens, head_size]``, each sequence over its row of the cache."""
        if sum(batch.query_lengths) != query.shape[1]:
            raise LayerError(
                f"attention {self.prefix!r}: query has {query.shape[1]} tokens, and query_lengths of the batch add up "
                f"to {sum(batch.query_lengths)}: call the model with the tokens of all its sequences"
            )
        cache = self._cache(batch, key)
        parts = (torch.split_with_sizes(x, list(batch.query_lengths), dim=1) for x in (query, key, value))
        attended = []
        for q, k, v, start, row in zip(*parts, batch.context_lengths, batch.rows, strict=True):
            end = start + q.shape[1]
            if row >= cache.shape[0] or end > cache.shape[3]:
                raise LayerError(
                    f"attention {self.prefix!r}: a sequence has row {row} and {end} tokens, and its cache "
                    f"{cache.shape[0]} rows of {cache.shape[3]} tokens: make a larger one by kv_cache_shape"
                )
            keys, values = cache[row]
            keys[:, start:end] = k
            values[:, start:end] = v
            first = 0 if self.sliding_window is None else max(0, start + 1 - self.sliding_window)
            attended.append(self._attend(q, keys[:, first:end], values[:, first:end]))
        return torch.cat(attended or [query], dim=1)

    def _cache(self, batch: AttentionBatch, key: Tensor) -> Tensor:
        """Return this layer's cache, once it is known to hold what ``key`` has."""
        cache = batch.caches.get(self.prefix)
        if cache is None:
            known = ", ".join(map(repr, list(batch.caches)[:3])) or "no layer"
            raise LayerError(
                f"attention {self.prefix!r}: the batch has no cache for the layer, but for {known}: give one for each "
                "prefix of attention_layers(model)"
            )
        expected = self.kv_cache_shape(cache.shape[0] if cache.dim() else 0, cache.shape[3] if cache.dim() > 3 else 0)
        if tuple(cache.shape) != expected:
            raise LayerError(
                f"attention {self.prefix!r}: its cache has shape {tuple(cache.shape)}, expected [rows, 2, "
                f"{self.num_kv_heads}, tokens, {self.head_size}]: make it by kv_cache_shape(num_blocks, block_size)"
            )
        name = f"the cache of {self.prefix!r}"
        expect_same_dtype("attention", name, cache, "key", key)
        expect_same_device("attention", name, cache, "key", key)
        return cache

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend with queries of the last tokens of ``key``, as ``[heads, tokens, head_size]``."""
        tokens, seen = query.shape[1], key.shape[1]
        mask = self._mask(tokens, seen, query.device)
        if self.logits_soft_cap is None and self.sinks is None:
            causal = mask is None and tokens > 1
            query, key, value = query[None], key[None], value[None]
            grouped = self.num_kv_heads != self.num_heads
            return self.attend(query, key, value, mask, 0.0, causal, scale=self.scale, enable_gqa=grouped)[0]
        if mask is None and tokens > 1:
            mask = _visible(tokens, seen, None, query.device)
        return self._softmax(query, key, value, mask)

    def _mask(self, tokens: int, seen: int, device: torch.device) -> Tensor | None:
        """Return which keys each query sees, ``None`` where they are all, or all up to its own of as many."""
        window = self.sliding_window
        if (window is None or seen <= window) and (tokens == 1 or tokens == seen):
            return None
        return _visible(tokens, seen, window, device)

    def _softmax(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attend step by step, as the capped scores and the sinks need, in float32 or float64."""
        expect_floating("attention", "query", query)
        for name, x in (("key", key), ("value", value)):
            expect_same_dtype("attention", name, x, "query", query)
            expect_same_device("attention", name, x, "query", query)
        dtype = compute_dtype(query.dtype)
        groups = (self.num_kv_heads, self.num_heads // self.num_kv_heads)
        scores = query.reshape(*groups, *query.shape[1:]).to(dtype) @ key.unsqueeze(1).to(dtype).mT * self.scale
        if self.logits_soft_cap is not None:
            scores = self.logits_soft_cap * torch.tanh(scores / self.logits_soft_cap)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.to(dtype).view(*groups, 1, 1).expand(*scores.shape[:-1], 1)
            shares = torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
        else:
            shares = scores.softmax(dim=-1)
        return (shares @ value.unsqueeze(1).to(dtype)).flatten(0, 1).to(query.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_heads}, {self.head_size}, scale={self.scale}, num_kv_heads={self.num_kv_heads}"


def _expect_settings(head_size: int, scale: float, window: int | None, cap: float | None) -> None:
    """Raise ``ValueError`` for what no layer can have."""
    for name, value in (("head_size", head_size), ("sliding_window", window)):
        if value is not None:
            expect_size("attention", name, value)
            expect_positive("attention", name, value)
    for name, number in (("scale", scale), ("logits_soft_cap", 1.0 if cap is None else cap)):
        if not isinstance(number, (int, float)) or not math.isfinite(number):
            raise ValueError(f"attention: {name} is {number!r}, expected a finite number")
    if cap is not None:
        expect_positive("attention", "logits_soft_cap", cap)


def _visible(tokens: int, seen: int, window: int | None, device: torch.device) -> Tensor:
    """Return ``[tokens, seen]``: true where one of the last queries sees a key."""
    behind = torch.arange(seen - tokens, seen, device=device)[:, None] - torch.arange(seen, device=device)
    return (behind >= 0) if window is None else (behind >= 0) & (behind < window)


def attention_layers(model: nn.Module) -> dict[str, Attention]:
    """Return the attention layers of a model by the prefix under which each finds its cache.

    Raises:
        LayerError: two have one prefix, and so would have one cache.
    """
    layers: dict[str, Attention] = {}
    for path, layer in model.named_modules():
        if isinstance(layer, Attention) and layers.setdefault(layer.prefix, layer) is not layer:
            raise LayerError(
                f"the attention layer {path!r} has the prefix {layer.prefix!r}, as another one of the model has: both "
                "would write to one cache. Give each layer its path as prefix"
            )
    return layers
