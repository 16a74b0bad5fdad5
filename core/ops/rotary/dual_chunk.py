"""The rotary embedding with positions in chunks."""

from __future__ import annotations

from typing import Any

import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.derivation import NATIVE, calls_functional
from opgraft.ops.checks import expect_in_range
from opgraft.ops.rotary import functional as forms
from opgraft.ops.rotary.modules import TRITON, cos_sin_table, expect_rotation, inverse_frequencies
from torch import Tensor

__all__ = ["DualChunkRotaryEmbedding"]


@CustomOp.register("dual_chunk_rotary_embedding")
class DualChunkRotaryEmbedding(CustomOp):
    """Rotary embedding by places in chunks, with five places for a query.

    An et al., arXiv:2402.17463. ``opgraft.functional.dual_chunk_rotary_embedding`` lists the
    places. All of them are rows of one table with ``2 · chunk_size - local_size`` rows, on torch's
    default device at construction. vLLM keeps a table for each place, on a fixed device.

    Args:
        max_position_embeddings: bound of the positions.
        chunk_size: positions of a chunk.
        local_size: positions that a chunk shares with the next.

    The other arguments are those of ``RotaryEmbeddingBase``.

    Raises:
        ValueError: ``local_size`` is not from 0 to below ``chunk_size``, or ``rotary_dim`` does not
            fit the head.
    """

    cos_sin_cache: Tensor

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype,
        chunk_size: int,
        local_size: int,
    ) -> None:
        super().__init__()
        expect_rotation("dual_chunk_rotary_embedding", rotary_dim, head_size, base, dtype)
        rows = forms.chunk_length(chunk_size, local_size) + chunk_size

        self.head_size = head_size
        self.rotary_dim = rotary_dim
        self.max_position_embeddings = max_position_embeddings
        self.base = base
        self.is_neox_style = is_neox_style
        self.dtype = dtype
        self.chunk_size = chunk_size
        self.local_size = local_size

        table = cos_sin_table(inverse_frequencies(base, rotary_dim, dtype), rows)
        self.register_buffer("cos_sin_cache", table.to(dtype), persistent=False)

    @calls_functional
    def forward_native(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor,
        offsets: Tensor | None = None,
        *,
        functional: Any = NATIVE,
    ) -> tuple[Tensor, Tensor]:
        """Return five queries, concatenated along the last dimension, and the key in its shape.

        Args:
            positions: integers ``[num_tokens]`` or ``[batch, sequence]``.
            query: as for ``RotaryEmbeddingBase``.
            key: as for ``RotaryEmbeddingBase``.
            offsets: added to ``positions``, for all five queries; in vLLM for the first only.

        Raises:
            ValueError: as ``RotaryEmbeddingBase``.
        """
        positions = positions if offsets is None else positions + offsets
        op = "dual_chunk_rotary_embedding"
        expect_in_range(op, "positions", positions, self.max_position_embeddings)
        return functional.dual_chunk_rotary_embedding(
            positions,
            query,
            key,
            self.head_size,
            self.cos_sin_cache,
            self.chunk_size,
            self.local_size,
            self.is_neox_style,
        )

    # Makes forward_cuda and forward_xpu.
    functional_cuda = functional_xpu = TRITON

    def extra_repr(self) -> str:
        return (
            f"head_size={self.head_size}, rotary_dim={self.rotary_dim}, base={self.base}, "
            f"chunk_size={self.chunk_size}, local_size={self.local_size}, "
            f"is_neox_style={self.is_neox_style}"
        )
