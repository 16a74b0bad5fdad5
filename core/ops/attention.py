"""Attention without a key-value cache."""

from __future__ import annotations

from opgraft.custom_op import CustomOp
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
