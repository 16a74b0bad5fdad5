"""Attention without a key-value cache."""

from __future__ import annotations

from itertools import pairwise

import torch
from opgraft.custom_op import CustomOp
from opgraft.ops.checks import expect_same_shape
from torch import Tensor
from torch.nn import functional as F


@CustomOp.register("scaled_dot_product_attention")
class ScaledDotProductAttention(CustomOp):
    """``softmax(Q · Kᵀ · scale + mask) · V``, called as ``torch.nn.functional.scaled_dot_product_attention``.

    Vaswani et al., arXiv:1706.03762. As with torch's function, dropout applies in evaluation mode too: pass 0 there.

    Shapes:
        query ``[..., query_heads, L, E]``, key ``[..., heads, S, E]``, value ``[..., heads, S, Ev]``, result
        ``[..., query_heads, L, Ev]``. Without ``enable_gqa`` there are as many heads as query heads.
    """

    def forward_native(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """The attended values.

        Args:
            attn_mask: broadcasts to ``[..., query_heads, L, S]``; a boolean one is true where a key takes part, any
                other is added to the scores.
            dropout_p: probability with which an attention weight is dropped.
            is_causal: query ``i`` sees keys ``0 … i``; excludes ``attn_mask``.
            scale: multiplies the scores; ``1/√E`` if not given.
            enable_gqa: each key head serves ``query_heads / heads`` query heads (arXiv:2305.13245).

        Raises:
            ValueError: query and key differ in ``E``, or with ``enable_gqa`` the heads do not divide the query heads.
        """
        if query.shape[-1] != key.shape[-1]:
            raise ValueError(
                f"scaled_dot_product_attention: key has head size {key.shape[-1]}, expected {query.shape[-1]} "
                "as query has"
            )
        if enable_gqa and query.shape[-3] % key.shape[-3]:
            raise ValueError(
                f"scaled_dot_product_attention: key has {key.shape[-3]} heads, expected a divisor of the "
                f"{query.shape[-3]} heads of query"
            )
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


@CustomOp.register("mm_encoder_attn")
class MMEncoderAttention(CustomOp):
    """Bidirectional attention of a vision or audio encoder over sequences packed one after another.

    ``softmax(Q · Kᵀ · scale) · V`` (arXiv:1706.03762) within each sequence; each key head serves
    ``num_heads / num_kv_heads`` query heads (arXiv:2305.13245). It is always enabled, whatever ``custom_ops`` says.

    Args:
        num_heads: query heads.
        head_size: elements of a head, the same for query, key and value.
        scale: multiplies the scores; ``1/√head_size`` if not given.
        num_kv_heads: key and value heads, a divisor of ``num_heads``; ``num_heads`` if not given.
        prefix: the layer's path in its model, for kernels that keep tables by layer.
        multimodal_config: an engine's settings, for kernels that read them.

    Raises:
        ValueError: ``num_kv_heads`` does not divide ``num_heads`` (vLLM asserts it).
    """

    switchable = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float | None = None,
        num_kv_heads: int | None = None,
        prefix: str = "",
        multimodal_config: object = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = head_size**-0.5 if scale is None else scale
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.prefix = prefix
        self.multimodal_config = multimodal_config
        if self.num_kv_heads < 1 or num_heads % self.num_kv_heads:
            raise ValueError(f"mm_encoder_attn: num_kv_heads is {num_kv_heads}, expected a divisor of {num_heads}")

    def forward_native(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: Tensor | int | None = None,
        sequence_lengths: Tensor | None = None,
    ) -> Tensor:
        """The attended values, in the shape of ``query``.

        Args:
            query: ``[batch, tokens, num_heads · head_size]`` or ``[batch, tokens, num_heads, head_size]``.
            key: the same with ``num_kv_heads``; without ``cu_seqlens`` its number of tokens is its own.
            value: as ``key``.
            cu_seqlens: where packed sequences begin and end: integers ``[sequences + 1]``, ascending from 0 to
                ``batch · tokens``. Tokens of all batch rows count through; a token sees those of its own sequence.
            max_seqlen: a bound on the packed lengths, for kernels that need one; not read here.
            sequence_lengths: without ``cu_seqlens``, the true lengths ``[batch]`` of rows padded on the right: keys
                beyond them are not seen and the result there is zero. Beside ``cu_seqlens``, which says it all, it is
                for kernels that need the lengths apart; not read here.

        Raises:
            ValueError: a shape does not fit, or ``cu_seqlens`` does not end at the number of tokens.
        """
        q = self._as_heads("query", query, self.num_heads)
        k = self._as_heads("key", key, self.num_kv_heads)
        v = self._as_heads("value", value, self.num_kv_heads)
        expect_same_shape("mm_encoder_attn", "value", v, "key", k)
        if q.shape[0] != k.shape[0] or (cu_seqlens is not None and q.shape[1] != k.shape[1]):
            raise ValueError(
                f"mm_encoder_attn: key has shape {tuple(key.shape)}, expected the batch, and with cu_seqlens also the "
                f"tokens, of query, {tuple(query.shape)}"
            )
        if cu_seqlens is not None:
            return self._packed(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu_seqlens).reshape(query.shape)
        if sequence_lengths is not None:
            return self._padded(q, k, v, sequence_lengths).reshape(query.shape)
        return self._attend(q, k, v).reshape(query.shape)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Block-diagonal attention over ``[tokens, heads, head_size]``."""
        tokens = query.shape[0]
        if torch.compiler.is_compiling():
            # The lengths are data: a loop over them would break the graph, a mask does not.
            segment = torch.searchsorted(cu_seqlens, torch.arange(tokens, device=cu_seqlens.device), right=True)
            return self._attend(query[None], key[None], value[None], segment[:, None] == segment)[0]
        bounds: list[int] = cu_seqlens.tolist()
        lengths = [end - start for start, end in pairwise(bounds)]
        if not bounds or bounds[0] != 0 or bounds[-1] != tokens or any(length < 0 for length in lengths):
            raise ValueError(f"mm_encoder_attn: cu_seqlens is {bounds}, expected it to ascend from 0 to {tokens}")
        segments = zip(*(torch.split_with_sizes(x, lengths) for x in (query, key, value)), strict=True)
        attended = [self._attend(q[None], k[None], v[None])[0] for q, k, v in segments]
        return torch.cat(attended) if attended else torch.empty_like(query)

    def _padded(self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
        if lengths.shape != query.shape[:1]:
            raise ValueError(
                f"mm_encoder_attn: sequence_lengths has shape {tuple(lengths.shape)}, expected ({query.shape[0]},)"
            )
        key_seen = torch.arange(key.shape[1], device=lengths.device) < lengths[:, None]
        query_seen = torch.arange(query.shape[1], device=lengths.device) < lengths[:, None]
        attended = self._attend(query, key, value, key_seen[:, None, None, :])
        return attended.masked_fill(~query_seen[:, :, None, None], 0.0)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attention over ``[batch, tokens, heads, head_size]``."""
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        grouped = self.num_kv_heads != self.num_heads
        attended = F.scaled_dot_product_attention(query, key, value, mask, scale=self.scale, enable_gqa=grouped)
        return attended.transpose(1, 2)

    def _as_heads(self, argument: str, x: Tensor, heads: int) -> Tensor:
        packed, split = (heads * self.head_size,), (heads, self.head_size)
        if tuple(x.shape[2:]) not in (packed, split):
            raise ValueError(
                f"mm_encoder_attn: {argument} has shape {tuple(x.shape)}, expected [batch, tokens, {packed[0]}] or "
                f"[batch, tokens, {heads}, {self.head_size}]"
            )
        return x.reshape(*x.shape[:2], *split)

    def extra_repr(self) -> str:
        return f"{self.num_heads}, {self.head_size}, scale={self.scale}, num_kv_heads={self.num_kv_heads}"
