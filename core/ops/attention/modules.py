"""Attention without a key-value cache: modules around ``opgraft.ops.attention.functional``."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, ClassVar

import torch
from opgraft.binding.custom_op import CustomOp, maybe_get_oot_by_class
from opgraft.binding.derivation import NATIVE, calls_functional
from opgraft.ops.attention import functional as forms
from opgraft.ops.attention.functional import as_heads
from opgraft.ops.on_triton import on_triton
from torch import Tensor

__all__ = ["MMEncoderAttention", "ScaledDotProductAttention"]

TRITON = on_triton("opgraft.ops.attention.quantized.triton")


def _by_flash_kernel(
    op: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor | None = None,
    max_seqlen: Tensor | int | None = None,
    sequence_lengths: Tensor | None = None,
) -> Tensor:
    """Attend by ``_forward_fa``: the ``forward_cuda`` of a class that overrides it."""
    attended: Tensor = op._forward_fa(query, key, value, cu_seqlens, max_seqlen)
    return attended


@CustomOp.register("scaled_dot_product_attention")
class ScaledDotProductAttention(CustomOp):
    """``softmax(Q · Kᵀ · scale + mask) · V`` (Vaswani et al., arXiv:1706.03762).

    The call is that of ``torch.nn.functional.scaled_dot_product_attention``. As with torch's
    function, dropout applies in evaluation mode too: pass 0 there.

    Shapes:
        query ``[..., query_heads, L, E]``, key ``[..., heads, S, E]``, value
        ``[..., heads, S, Ev]``, result ``[..., query_heads, L, Ev]``. Without ``enable_gqa``,
        ``heads`` equals ``query_heads``.
    """

    @calls_functional
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
        functional: Any = NATIVE,
    ) -> Tensor:
        """Attend to values.

        See ``opgraft.functional.scaled_dot_product_attention`` for arguments and errors.
        """
        attended: Tensor = functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
        return attended

    # Makes forward_cuda and forward_xpu. Torch has a kernel for the plain result.
    functional_cuda = functional_xpu = TRITON


@CustomOp.register("mm_encoder_attn")
class MMEncoderAttention(CustomOp):
    """Bidirectional attention of a vision or audio encoder over packed sequences.

    Computes ``softmax(Q · Kᵀ · scale) · V`` (arXiv:1706.03762) within each sequence. Each key head
    serves ``num_heads / num_kv_heads`` query heads (arXiv:2305.13245). The op is always enabled;
    ``custom_ops`` does not count.

    Args:
        num_heads: query heads.
        head_size: elements of a head, the same for query, key and value.
        scale: multiplies the scores; ``1/√head_size`` by default.
        num_kv_heads: key and value heads, a divisor of ``num_heads``; ``num_heads`` by default.
        prefix: the layer's path in its model, for kernels with tables by layer.
        multimodal_config: an engine's settings, for kernels. Older versions of vLLM pass them.

    Raises:
        ValueError: ``num_heads`` or ``head_size`` is not positive, or ``num_kv_heads`` does not
            divide ``num_heads`` (an assertion in vLLM).
    """

    switchable = False
    _helpers: ClassVar[tuple[str, ...]] = ("_forward_sdpa",)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Add ``forward_cuda`` to a class with a ``_forward_fa`` of its own.

        Plugins for vLLM override ``_forward_fa`` alone.
        """
        super().__init_subclass__(**kwargs)
        if "_forward_fa" in vars(cls) and "forward_cuda" not in vars(cls):
            # An assignment fails mypy, as no class declares the attribute.
            setattr(cls, "forward_cuda", _by_flash_kernel)  # noqa: B010

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
        if num_kv_heads is None:
            num_kv_heads = num_heads
        forms.expect_kv_heads(num_heads, num_kv_heads)
        if head_size < 1:
            raise ValueError(
                f"mm_encoder_attn: head_size is {head_size}, expected a positive number"
            )

        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = head_size**-0.5 if scale is None else scale
        self.num_kv_heads = num_kv_heads
        self.num_queries_per_kv = num_heads // num_kv_heads

        self.prefix = self.layer_name = prefix
        self.multimodal_config = multimodal_config
        self.dtype = torch.get_default_dtype()

    @classmethod
    def compute_max_seqlen(cls, attn_backend: object, cu_seqlens: Any) -> int:
        """Return ``max_seqlen`` for all layers of an encoder: the length of the longest sequence.

        The active replacement answers, if there is one.

        Args:
            attn_backend: the kernel that an engine has chosen, for replacements.
            cu_seqlens: the bounds of sequences: an array or a sequence of integers on the host.
        """
        replacement: Any = maybe_get_oot_by_class(cls.op_class)
        if replacement is not cls.op_class:
            return int(replacement.compute_max_seqlen(attn_backend, cu_seqlens))
        return max((int(end) - int(start) for start, end in pairwise(cu_seqlens)), default=0)

    @classmethod
    def maybe_compute_seq_lens(
        cls, attn_backend: object, cu_seqlens: Any, device: torch.device | str
    ) -> Tensor | None:
        """Return ``sequence_lengths`` for all layers of an encoder.

        The active replacement answers. Without a replacement, the answer is ``None``: the native
        definition reads the lengths from ``cu_seqlens``.

        Args:
            attn_backend: the kernel that an engine has chosen, for replacements.
            cu_seqlens: the bounds of sequences: an array or a sequence of integers on the host.
            device: the device of the result.
        """
        replacement: Any = maybe_get_oot_by_class(cls.op_class)
        if replacement is cls.op_class:
            return None

        lengths: Tensor | None = replacement.maybe_compute_seq_lens(
            attn_backend, cu_seqlens, device
        )
        return lengths

    @classmethod
    def maybe_recompute_cu_seqlens(
        cls,
        attn_backend: object,
        cu_seqlens: Any,
        hidden_size: int,
        tp_size: int,
        device: torch.device | str,
        fp8_padded_hidden_size: int | None = None,
    ) -> Tensor:
        """Return ``cu_seqlens`` for all layers of an encoder.

        The active replacement answers. Without a replacement, the answer is the given bounds on
        ``device``.

        Args:
            attn_backend: the kernel that an engine has chosen, for replacements.
            cu_seqlens: the bounds of sequences: an array or a sequence of integers on the host.
            hidden_size: elements of a token, for kernels that count elements.
            tp_size: the number of devices that share a token's elements, for the same kernels.
            device: the device of the result.
            fp8_padded_hidden_size: elements of a token after quantization, for the same kernels.
        """
        replacement: Any = maybe_get_oot_by_class(cls.op_class)
        if replacement is cls.op_class:
            return torch.as_tensor(cu_seqlens, device=device)

        bounds: Tensor = replacement.maybe_recompute_cu_seqlens(
            attn_backend,
            cu_seqlens,
            hidden_size,
            tp_size,
            device,
            fp8_padded_hidden_size=fp8_padded_hidden_size,
        )
        return bounds

    def view_qkv_to_4d(
        self, query: Tensor, key: Tensor, value: Tensor, bsz: int, q_len: int, kv_len: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """View query, key and value as ``[batch, tokens, heads, head_size]``."""
        q = query.view(bsz, q_len, self.num_heads, self.head_size)
        k = key.view(bsz, kv_len, self.num_kv_heads, self.head_size)
        v = value.view(bsz, kv_len, self.num_kv_heads, self.head_size)
        return q, k, v

    maybe_reshape_qkv_to_4d = view_qkv_to_4d
    """The name of older versions of vLLM for ``view_qkv_to_4d``."""

    def _forward_sdpa(
        self, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """Attend by torch's own attention, for the native definition."""
        return self._attended(query, key, value, cu_seqlens, None, NATIVE)

    def _forward_fa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: Tensor | int | None = None,
    ) -> Tensor:
        """Attend by the flash kernel of a replacement; here as ``_forward_sdpa``."""
        return self._forward_sdpa(query, key, value, cu_seqlens)

    @calls_functional
    def forward_native(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: Tensor | int | None = None,
        sequence_lengths: Tensor | None = None,
        *,
        functional: Any = NATIVE,
    ) -> Tensor:
        """Return the attended values, in the shape of ``query``.

        Args:
            query: ``[batch, tokens, num_heads · head_size]`` or
                ``[batch, tokens, num_heads, head_size]``.
            key: the same with ``num_kv_heads``; without ``cu_seqlens``, the number of tokens may
                differ from the query's.
            value: as ``key``.
            cu_seqlens: the bounds of packed sequences: integers ``[sequences + 1]``, ascending from
                0 to ``batch · tokens``. Tokens are counted through all batch rows. A token sees the
                tokens of its own sequence.
            max_seqlen: a bound on the packed lengths, for kernels; not read here.
            sequence_lengths: the true lengths ``[batch]`` of rows padded on the right. Keys beyond
                the length are not seen, and the result there is zero. Beside ``cu_seqlens``, the
                lengths are for kernels, and not read here.

        Raises:
            ValueError: a shape, a dtype or a device does not fit; ``cu_seqlens`` does not ascend
                from 0 to the number of tokens; or ``sequence_lengths`` are not from 0 to the number
                of keys.
        """
        lengths = sequence_lengths if cu_seqlens is None else None
        # A replacement may override `_forward_sdpa` alone, as in plugins for vLLM.
        if lengths is None and self._overrides_helpers:
            return self._forward_sdpa(query, key, value, cu_seqlens)
        return self._attended(query, key, value, cu_seqlens, lengths, functional)

    def _attended(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor | None,
        sequence_lengths: Tensor | None,
        functional: Any,
    ) -> Tensor:
        heads = as_heads("query", query, self.num_heads, self.head_size)
        attended: Tensor = functional.mm_encoder_attn(
            heads,
            key,
            value,
            self.num_heads,
            self.num_kv_heads,
            self.scale,
            cu_seqlens,
            sequence_lengths,
        )
        return attended.reshape(query.shape)

    def extra_repr(self) -> str:
        return (
            f"{self.num_heads}, {self.head_size}, scale={self.scale}, "
            f"num_kv_heads={self.num_kv_heads}"
        )
