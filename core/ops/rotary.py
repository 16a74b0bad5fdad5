"""Rotary position embedding (Su et al., RoFormer, arXiv:2104.09864).

Elements of a head are rotated in pairs, pair ``i`` at position ``p`` by the angle ``p · θ_i``. In the GPT-NeoX style
the two halves of the rotated part are paired with each other, in the GPT-J style its even elements with the odd ones.
"""

from __future__ import annotations

import torch
from opgraft.custom_op import CustomOp
from opgraft.ops.precision import compute_dtype
from torch import Tensor


@CustomOp.register("apply_rotary_emb")
class ApplyRotaryEmb(CustomOp):
    """Rotates heads by given cosines and sines (arXiv:2104.09864).

    ``(x1, x2)`` becomes ``(x1 · cos - x2 · sin, x2 · cos + x1 · sin)``. This definition computes half types in float32
    and rounds once, whatever ``enable_fp32_compute`` says.

    Args:
        enforce_enable: enable this instance whatever ``custom_ops`` says.
        is_neox_style: pair the halves of a head; otherwise even elements with odd ones.
        enable_fp32_compute: a kernel must compute in float32 instead of the input's dtype.

    Shapes:
        ``x`` is ``[sequence, heads, head_size]`` or ``[batch, sequence, heads, head_size]``, and so is the result;
        ``cos`` and ``sin`` are ``[sequence, head_size / 2]``.
    """

    def __init__(
        self, enforce_enable: bool = False, is_neox_style: bool = True, enable_fp32_compute: bool = False
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.is_neox_style = is_neox_style
        self.enable_fp32_compute = enable_fp32_compute

    def forward_native(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The rotated ``x``, in new memory.

        Raises:
            ValueError: ``x`` has fewer than three dimensions, or ``cos`` or ``sin`` does not fit it.
        """
        if x.dim() < 3 or x.shape[-1] % 2:
            raise ValueError(
                f"apply_rotary_emb: x has shape {tuple(x.shape)}, expected [..., sequence, heads, head_size] with an "
                "even head_size"
            )
        expected = (x.shape[-3], x.shape[-1] // 2)
        for argument, table in (("cos", cos), ("sin", sin)):
            if tuple(table.shape) != expected:
                raise ValueError(
                    f"apply_rotary_emb: {argument} has shape {tuple(table.shape)}, expected {expected} for x of shape "
                    f"{tuple(x.shape)}"
                )
        return _rotated(x, cos.unsqueeze(-2), sin.unsqueeze(-2), self.is_neox_style)


@CustomOp.register("rotary_embedding")
class RotaryEmbeddingBase(CustomOp):
    """Rotates query and key by their positions, from a table of cosines and sines (arXiv:2104.09864).

    ``θ_i = base^(-2i / rotary_dim)``. The first ``rotary_dim`` elements of each head are rotated, the rest passes. The
    table is computed in float32 (float64 if ``dtype`` is) and kept in ``dtype`` as the buffer ``cos_sin_cache``,
    ``[max_position_embeddings, rotary_dim]``: cosines, then sines. It moves with the module and is not saved with it.
    Half types are rotated in float32 and rounded once.

    This definition writes to neither query nor key and returns new memory; a kernel may rotate both in place. A variant
    with other frequencies or scaling overrides ``_compute_inv_freq`` or ``_compute_cos_sin_cache``.

    Args:
        head_size: elements of a head.
        rotary_dim: how many of them are rotated, an even number.
        max_position_embeddings: number of positions in the table.
        base: the base of the frequencies, 10000 in the paper.
        is_neox_style: pair the halves of the rotated part; otherwise even elements with odd ones.
        dtype: dtype of the table.
        init_cache: compute the table now; otherwise the subclass does, before the first call.

    Raises:
        ValueError: ``rotary_dim`` is odd, not positive, or greater than ``head_size``.
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
        if rotary_dim % 2 or not 0 < rotary_dim <= head_size:
            raise ValueError(
                f"rotary_embedding: rotary_dim is {rotary_dim}, expected an even number from 2 to head_size={head_size}"
            )
        self.head_size = head_size
        self.rotary_dim = rotary_dim
        self.max_position_embeddings = max_position_embeddings
        self.base = base
        self.is_neox_style = is_neox_style
        self.dtype = dtype
        if init_cache:
            self.register_buffer("cos_sin_cache", self._compute_cos_sin_cache().to(dtype), persistent=False)

    def _compute_inv_freq(self, base: float) -> Tensor:
        """``θ``, in radians per position: ``[rotary_dim / 2]``."""
        exponents = torch.arange(0, self.rotary_dim, 2, dtype=compute_dtype(self.dtype)) / self.rotary_dim
        return 1.0 / torch.pow(base, exponents)

    def _compute_cos_sin_cache(self) -> Tensor:
        """Cosines and sines of all positions: ``[max_position_embeddings, rotary_dim]``, before the cast to dtype."""
        inv_freq = self._compute_inv_freq(self.base)
        positions = torch.arange(self.max_position_embeddings, dtype=inv_freq.dtype)
        angles = torch.outer(positions, inv_freq)
        return torch.cat((angles.cos(), angles.sin()), dim=-1)

    def forward_native(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The rotated query and key, each in the shape it came in; a key of ``None`` stays ``None``.

        Args:
            positions: integers ``[num_tokens]`` or ``[batch, sequence]``, each less than ``max_position_embeddings``.
            query: for each position ``heads · head_size`` elements, or ``[heads, head_size]``; the tokens are in the
                shape of ``positions`` or flattened.
            key: the same, with a number of heads of its own.

        Raises:
            ValueError: the tokens of query or key are not those of ``positions``, or the last dimension is not a
                multiple of ``head_size``.
        """
        return self._rotate("query", query, positions), None if key is None else self._rotate("key", key, positions)

    def _rotate(self, argument: str, x: Tensor, positions: Tensor) -> Tensor:
        heads = self._as_heads(argument, x)
        tokens = positions if x.shape[: positions.dim()] == positions.shape else positions.flatten()
        if heads.shape[: tokens.dim()] != tokens.shape:
            raise ValueError(
                f"rotary_embedding: {argument} has shape {tuple(x.shape)}, expected it to begin with "
                f"{tuple(positions.shape)} as positions do, or with {positions.numel()}"
            )
        cos, sin = self.cos_sin_cache[tokens].chunk(2, dim=-1)
        per_head = (*tokens.shape, *(1,) * (heads.dim() - tokens.dim() - 1), self.rotary_dim // 2)
        rotated = _rotated(
            heads[..., : self.rotary_dim], cos.reshape(per_head), sin.reshape(per_head), self.is_neox_style
        )
        return torch.cat((rotated, heads[..., self.rotary_dim :]), dim=-1).reshape(x.shape)

    def _as_heads(self, argument: str, x: Tensor) -> Tensor:
        if x.dim() < 2 or x.shape[-1] % self.head_size:
            raise ValueError(
                f"rotary_embedding: {argument} has shape {tuple(x.shape)}, expected a last dimension that is a "
                f"multiple of head_size={self.head_size}"
            )
        return x.reshape(*x.shape[:-1], x.shape[-1] // self.head_size, self.head_size)

    def extra_repr(self) -> str:
        return (
            f"head_size={self.head_size}, rotary_dim={self.rotary_dim}, base={self.base}, "
            f"max_position_embeddings={self.max_position_embeddings}, is_neox_style={self.is_neox_style}"
        )


class RotaryEmbedding(RotaryEmbeddingBase):
    """The rotary embedding with plain frequencies, which ``rotary_embedding`` switches too.

    A class of its own so that a replacement of it leaves the variants with other frequencies alone.
    """


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, is_neox_style: bool) -> Tensor:
    """``x`` with its pairs rotated; ``cos`` and ``sin`` broadcast to ``[..., pairs]``."""
    dtype = compute_dtype(x.dtype)
    first, second = x.to(dtype).chunk(2, dim=-1) if is_neox_style else (x[..., 0::2].to(dtype), x[..., 1::2].to(dtype))
    cos, sin = cos.to(dtype), sin.to(dtype)
    pair = (first * cos - second * sin, second * cos + first * sin)
    rotated = torch.cat(pair, dim=-1) if is_neox_style else torch.stack(pair, dim=-1).flatten(-2)
    return rotated.to(x.dtype)
