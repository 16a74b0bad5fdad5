"""Rotary position embedding: modules around the forms of ``opgraft.ops.rotary.functional``.

Variants of these plain classes are in ``opgraft.ops.rotary.variants``,
``opgraft.ops.rotary.scaled`` and ``opgraft.ops.rotary.dual_chunk``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.derivation import NATIVE, calls_functional
from opgraft.ops.checks import FLOATING, expect_choice, expect_positive
from opgraft.ops.on_triton import on_triton
from opgraft.ops.precision import compute_dtype
from opgraft.ops.rotary import functional as forms
from torch import Tensor

__all__ = ["ApplyRotaryEmb", "RotaryEmbedding", "RotaryEmbeddingBase"]

TRITON = on_triton("opgraft.ops.rotary.triton")


def inverse_frequencies(base: float, rotary_dim: int, dtype: torch.dtype) -> Tensor:
    """Return ``θ_i = base^(-2i / rotary_dim)``, in radians per position.

    The result is ``[rotary_dim / 2]``, in float32 or wider.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=compute_dtype(dtype)) / rotary_dim
    return 1.0 / torch.pow(base, exponents)


def cos_sin_table(inv_freq: Tensor, rows: int, scale: float = 1.0) -> Tensor:
    """Return cosines, then sines, of the first ``rows`` positions: ``[rows, rotary_dim]``.

    Both are multiplied by ``scale``.
    """
    positions = torch.arange(rows, dtype=inv_freq.dtype)
    angles = torch.outer(positions, inv_freq)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * scale


def expect_rotation(
    op: str, rotary_dim: int, head_size: int, base: float, dtype: torch.dtype
) -> None:
    """Raise ``ValueError`` unless a table for ``rotary_dim`` elements of a head is possible."""
    expect_positive(op, "base", base)
    expect_choice(op, "dtype", dtype, FLOATING)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_size:
        raise ValueError(
            f"{op}: rotary_dim is {rotary_dim}, expected an even number from 2 to "
            f"head_size={head_size}"
        )


@CustomOp.register("apply_rotary_emb")
class ApplyRotaryEmb(CustomOp):
    """Rotates heads by given cosines and sines (arXiv:2104.09864).

    ``(x1, x2)`` becomes ``(x1 · cos - x2 · sin, x2 · cos + x1 · sin)``. This definition always
    computes half types in float32 and rounds once.

    Args:
        enforce_enable: enable this instance, against ``custom_ops`` too.
        is_neox_style: pair the halves of a head; otherwise even elements with odd ones.
        enable_fp32_compute: a kernel must compute in float32 instead of the input's dtype.

    Shapes:
        ``x`` and the result are ``[sequence, heads, head_size]`` or
        ``[batch, sequence, heads, head_size]``; ``cos`` and ``sin`` are
        ``[sequence, head_size / 2]``.
    """

    def __init__(
        self,
        enforce_enable: bool = False,
        is_neox_style: bool = True,
        enable_fp32_compute: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.is_neox_style = is_neox_style
        self.enable_fp32_compute = enable_fp32_compute

    @staticmethod
    def forward_static(
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        is_neox_style: bool = True,
        enable_fp32_compute: bool = False,
    ) -> Tensor:
        """Rotate ``x`` without an op, always as with ``enable_fp32_compute``."""
        return forms.apply_rotary_emb.native(x, cos, sin, is_neox_style)

    def _pre_process(
        self, x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, torch.Size, torch.dtype]:
        """Prepare the arguments of a kernel: four dimensions, and float32 if asked for.

        Returns:
            ``x``, ``cos`` and ``sin``, then the shape and dtype of ``x`` for ``_post_process``.
        """
        heads = x[None] if x.dim() == 3 else x
        if self.enable_fp32_compute:
            return heads.float(), cos.float(), sin.float(), x.shape, x.dtype
        return heads, cos, sin, x.shape, x.dtype

    def _post_process(
        self, output: Tensor, origin_shape: torch.Size, origin_dtype: torch.dtype
    ) -> Tensor:
        """Return a kernel's result with the dimensions and the dtype before ``_pre_process``."""
        if len(origin_shape) == 3:
            output = output[0]
        return output.to(origin_dtype) if self.enable_fp32_compute else output

    @calls_functional
    def forward_native(
        self, x: Tensor, cos: Tensor, sin: Tensor, *, functional: Any = NATIVE
    ) -> Tensor:
        """Rotate ``x``, in new memory.

        Raises:
            ValueError: ``x`` has fewer than three dimensions, or ``cos`` or ``sin`` does not fit
                ``x``.
        """
        return functional.apply_rotary_emb(x, cos, sin, self.is_neox_style)

    def rotate_heads(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rotate query and key in the layout of transformers' models, by two calls of this op.

        A replacement may override this to rotate both at once.

        Args:
            query: ``[batch, heads, sequence, head_size]``.
            key: as ``query``; the number of heads may differ.
            cos: ``[1, sequence, head_size]``; only the first half of a row is read.
            sin: as ``cos``.

        Returns:
            The rotated query and key, in their shapes.
        """
        pairs = cos.shape[-1] // 2
        cos = cos[0, :, :pairs]
        sin = sin[0, :, :pairs]
        rotated_query = self(query.transpose(1, 2), cos, sin)
        rotated_key = self(key.transpose(1, 2), cos, sin)
        return rotated_query.transpose(1, 2), rotated_key.transpose(1, 2)

    # Makes forward_cuda and forward_xpu.
    functional_cuda = functional_xpu = TRITON


@CustomOp.register("rotary_embedding")
class RotaryEmbeddingBase(CustomOp):
    """Rotates query and key by their positions, from a table of cosines and sines.

    Source: arXiv:2104.09864, with ``θ_i = base^(-2i / rotary_dim)``. The first ``rotary_dim``
    elements of each head are rotated, the rest passes. The table is computed in float32 (float64 if
    ``dtype`` is) and kept in ``dtype`` as the buffer ``cos_sin_cache``,
    ``[max_position_embeddings, rotary_dim]``: cosines, then sines. The buffer moves with the module
    and is not saved. Half types are rotated in float32 and rounded once.

    This definition returns new memory; a kernel may rotate query and key in place. A variant with
    other frequencies or scaling overrides ``_compute_inv_freq`` or ``_compute_cos_sin_cache``.

    Args:
        head_size: elements of a head.
        rotary_dim: rotated elements of a head, an even number.
        max_position_embeddings: number of positions in the table.
        base: the base of the frequencies, 10000 in the paper.
        is_neox_style: pair the halves of the rotated part; otherwise even elements with odd ones.
        dtype: dtype of the table.
        init_cache: compute the table now; otherwise the subclass must, before the first call.

    Raises:
        ValueError: ``rotary_dim`` is odd, not positive, or greater than ``head_size``; ``base`` or
            ``max_position_embeddings`` is not positive; or ops do not compute in ``dtype``.
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
        init_cache: bool = True,
    ) -> None:
        super().__init__()
        expect_rotation("rotary_embedding", rotary_dim, head_size, base, dtype)
        expect_positive("rotary_embedding", "max_position_embeddings", max_position_embeddings)

        self.head_size = head_size
        self.rotary_dim = rotary_dim
        self.max_position_embeddings = max_position_embeddings
        self.base = base
        self.is_neox_style = is_neox_style
        self.dtype = dtype

        if init_cache:
            table = self._compute_cos_sin_cache().to(dtype)
            self.register_buffer("cos_sin_cache", table, persistent=False)

    @functools.cached_property
    def apply_rotary_emb(self) -> ApplyRotaryEmb:
        """The op to rotate by cosines and sines in this op's style, for kernels with a look-up."""
        return ApplyRotaryEmb(is_neox_style=self.is_neox_style)

    def _match_cos_sin_cache_dtype(self, query: Tensor) -> Tensor:
        """Return the table with the device and dtype of ``query``, and keep the new table."""
        table = self.cos_sin_cache
        if table.device == query.device and table.dtype == query.dtype:
            return table

        table = table.to(query.device, query.dtype)
        # A traced tensor must not stay in the module.
        if not torch.compiler.is_compiling():
            self.cos_sin_cache = table
        return table

    def get_cos_sin(self, seqlen: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the first positions, ``[seqlen, rotary_dim / 2]`` each."""
        cos, sin = self.cos_sin_cache[:seqlen].chunk(2, dim=-1)
        return cos, sin

    def _compute_inv_freq(self, base: float) -> Tensor:
        """Return ``θ``, in radians per position: ``[rotary_dim / 2]``."""
        return inverse_frequencies(base, self.rotary_dim, self.dtype)

    def _compute_cos_sin_cache(self) -> Tensor:
        """Return cosines and sines of all positions, ``[max_position_embeddings, rotary_dim]``.

        The cast to the table's dtype follows.
        """
        inv_freq = self._compute_inv_freq(self.base)
        return cos_sin_table(inv_freq, self.max_position_embeddings)

    @calls_functional
    def forward_native(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor | None = None,
        *,
        functional: Any = NATIVE,
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate query and key, in their shapes; a key of ``None`` stays ``None``.

        Args:
            positions: integers ``[num_tokens]`` or ``[batch, sequence]``, rows of the table.
            query: for each position ``heads · head_size`` elements, or ``[heads, head_size]``; the
                tokens are in the shape of ``positions`` or flattened.
            key: as ``query``; the number of heads may differ.

        Raises:
            ValueError: a position is outside the table, the tokens of query or key are not those of
                ``positions``, a last dimension is no multiple of ``head_size``, or dtypes or
                devices do not fit.
        """
        return rotated_by(
            functional.rotary_embedding,
            positions,
            query,
            key,
            self.head_size,
            self.cos_sin_cache,
            self.is_neox_style,
        )

    # Makes forward_cuda and forward_xpu.
    functional_cuda = functional_xpu = TRITON

    def extra_repr(self) -> str:
        return (
            f"head_size={self.head_size}, rotary_dim={self.rotary_dim}, base={self.base}, "
            f"max_position_embeddings={self.max_position_embeddings}, "
            f"is_neox_style={self.is_neox_style}"
        )


class RotaryEmbedding(RotaryEmbeddingBase):
    """The rotary embedding with plain frequencies.

    ``rotary_embedding`` of ``custom_ops`` switches this class, too. A replacement of this class
    leaves the variants with other frequencies alone.
    """

    @staticmethod
    def forward_static(
        positions: Tensor,
        query: Tensor,
        key: Tensor | None,
        head_size: int,
        rotary_dim: int,
        cos_sin_cache: Tensor,
        is_neox_style: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate query and key without an op, by a table of ``rotary_dim`` columns."""
        form = forms.rotary_embedding.native
        return rotated_by(form, positions, query, key, head_size, cos_sin_cache, is_neox_style)


def rotated_by(
    form: Any, positions: Tensor, query: Tensor, key: Tensor | None, *settings: Any
) -> tuple[Tensor, Tensor | None]:
    """Apply a form that rotates query and key. The key may be ``None``, and then stays so."""
    if key is None:
        no_heads = query.new_empty((*query.shape[:-1], 0))
        rotated_query, _ = form(positions, query, no_heads, *settings)
        return rotated_query, None
    rotated_query, rotated_key = form(positions, query, key, *settings)
    return rotated_query, rotated_key


def moved(positions: Tensor, offsets: Tensor | None) -> Tensor:
    """Return positions plus offsets; without offsets, the positions."""
    return positions if offsets is None else positions + offsets
