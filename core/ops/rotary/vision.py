"""The rotary embedding of an image's patches by their columns and rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from opgraft.binding.derivation import NATIVE, calls_functional
from opgraft.ops.rotary.modules import TRITON, RotaryEmbeddingBase
from opgraft.registry.signatures import called_with
from torch import Tensor

__all__ = ["Llama4VisionRotaryEmbedding"]


class Llama4VisionRotaryEmbedding(RotaryEmbeddingBase):
    """The rotary embedding of Llama 4's vision encoder: pairs turn by column or by row.

    Even elements of a head are paired with odd ones. Columns and rows count from 1. The class token
    behind the patches is not turned. The buffer ``cos_sin_cache`` is complex,
    ``[patches + 1, 1, rotary_dim]``: cosines as real parts, sines as imaginary ones.

    Args:
        head_size: elements of a head.
        rotary_dim: half of ``head_size``.
        max_position_embeddings: patches of a square image.
        base: the base of the frequencies.
        is_neox_style: not read; there is one style.
        dtype: the dtype of the model, or ``torch.complex64`` as in vLLM's models.

    Raises:
        ValueError: ``rotary_dim`` is not half of ``head_size``, or the patches are not those of a
            square image.
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype,
    ) -> None:
        if 2 * rotary_dim != head_size:
            raise ValueError(
                f"rotary_embedding: rotary_dim is {rotary_dim}, expected half of "
                f"head_size={head_size}"
            )
        if math.isqrt(max_position_embeddings) ** 2 != max_position_embeddings:
            raise ValueError(
                f"rotary_embedding: max_position_embeddings is {max_position_embeddings}, expected "
                "the patches of a square image"
            )

        real = dtype.to_real()
        super().__init__(
            head_size,
            rotary_dim,
            max_position_embeddings,
            base,
            is_neox_style,
            real,
            init_cache=False,
        )
        table = self._compute_cos_sin_cache()

        # A replacement may compute a real table.
        if not table.is_complex():
            table = table.to(real)
        self.register_buffer("cos_sin_cache", table, persistent=False)

    def _compute_cos_sin_cache(self) -> Tensor:
        inv_freq = self._compute_inv_freq(self.base)
        side = math.isqrt(self.max_position_embeddings)
        along_side = torch.arange(1, side + 1, dtype=inv_freq.dtype)
        row, column = torch.meshgrid(along_side, along_side, indexing="ij")

        by_column = torch.outer(column.flatten(), inv_freq)
        by_row = torch.outer(row.flatten(), inv_freq)
        of_patches = torch.cat((by_column, by_row), dim=-1)

        of_class_token = torch.zeros_like(of_patches[:1])
        angles = torch.cat((of_patches, of_class_token))[:, None]
        return torch.complex(angles.cos(), angles.sin())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move and cast like any module. The cast of a complex table keeps imaginary parts."""

        def apply_to_parts(x: Tensor) -> Tensor:
            if not x.is_complex():
                return fn(x)

            # A cast of complex numbers to a real dtype would drop the imaginary parts.
            parts = fn(torch.view_as_real(x))
            if parts.dtype not in (torch.float32, torch.float64):
                parts = parts.float()
            return torch.view_as_complex(parts.contiguous())

        return super()._apply(apply_to_parts, recurse)  # type: ignore[no-untyped-call]

    @called_with(always=["key"])
    @calls_functional
    def forward_native(
        self, query: Tensor, key: Tensor | None = None, *, functional: Any = NATIVE
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate query and key; a key of ``None`` stays ``None``.

        Args:
            query: ``[batch, patches + 1, heads, head_size]``.
            key: as ``query``; the number of heads may differ.

        Raises:
            ValueError: a shape, a dtype or a device does not fit.
        """
        table = self.cos_sin_cache[:, 0]
        cos = table.real.contiguous()
        sin = table.imag.contiguous()
        rotate = functional.apply_rotary_emb
        rotated_query = rotate(query, cos, sin, False)
        rotated_key = None if key is None else rotate(key, cos, sin, False)
        return rotated_query, rotated_key

    # Makes forward_cuda and forward_xpu.
    functional_cuda = functional_xpu = TRITON
