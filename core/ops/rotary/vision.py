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


class Llama4VisionRotaryEmbedding(RotaryEmbeddingBase):
    """The rotary embedding of Llama 4's vision encoder: half of the pairs turn by column, half by row.

    Even elements of a head are paired with odd ones. Columns and rows count from 1; the class token, which comes after
    the patches, is not turned. The buffer ``cos_sin_cache`` is complex, ``[patches + 1, 1, rotary_dim]``: cosines as
    real parts, sines as imaginary ones.

    Args:
        head_size: elements of a head.
        rotary_dim: half of ``head_size``.
        max_position_embeddings: patches of a square image.
        base: the base of the frequencies.
        is_neox_style: not read; there is one style.
        dtype: ``torch.complex64``, as vLLM's models give it, or the dtype of the model.

    Raises:
        ValueError: ``rotary_dim`` is not half of ``head_size``, or the patches are not those of a square image.
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
                f"rotary_embedding: rotary_dim is {rotary_dim}, expected half of head_size={head_size}"
            )
        if math.isqrt(max_position_embeddings) ** 2 != max_position_embeddings:
            raise ValueError(
                f"rotary_embedding: max_position_embeddings is {max_position_embeddings}, expected the patches of a "
                "square image"
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
        self.register_buffer(
            "cos_sin_cache", table if table.is_complex() else table.to(real), persistent=False
        )

    def _compute_cos_sin_cache(self) -> Tensor:
        inv_freq = self._compute_inv_freq(self.base)
        side = math.isqrt(self.max_position_embeddings)
        row, column = torch.meshgrid(
            *(torch.arange(1, side + 1, dtype=inv_freq.dtype),) * 2, indexing="ij"
        )
        angles = torch.cat(
            [torch.outer(axis.flatten(), inv_freq) for axis in (column, row)], dim=-1
        )
        angles = torch.cat((angles, torch.zeros_like(angles[:1])))[:, None]
        return torch.complex(angles.cos(), angles.sin())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move and cast like any module, with cosines and sines as real numbers: a cast would drop imaginary ones."""

        def apart(x: Tensor) -> Tensor:
            if not x.is_complex():
                return fn(x)
            parts = fn(torch.view_as_real(x))
            exact = parts if parts.dtype in (torch.float32, torch.float64) else parts.float()
            return torch.view_as_complex(exact.contiguous())

        return super()._apply(apart, recurse)  # type: ignore[no-untyped-call]  # torch leaves it so

    @called_with(always=["key"])
    @calls_functional
    def forward_native(
        self, query: Tensor, key: Tensor | None = None, *, functional: Any = NATIVE
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate query and key; a key of ``None`` stays ``None``.

        Args:
            query: ``[batch, patches + 1, heads, head_size]``.
            key: the same, with a number of heads of its own.

        Raises:
            ValueError: a shape, a dtype or a device does not fit.
        """
        table = self.cos_sin_cache[:, 0]
        tables = (table.real.contiguous(), table.imag.contiguous(), False)
        turn = functional.apply_rotary_emb
        return turn(query, *tables), None if key is None else turn(key, *tables)

    functional_cuda = functional_xpu = TRITON  # makes forward_cuda, forward_xpu
