"""Variants of the rotary embedding for longer contexts.

They slow positions down, change the base, or have a factor for each pair.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from opgraft.binding.derivation import NATIVE, calls_functional
from opgraft.ops.checks import expect_positive
from opgraft.ops.precision import compute_dtype
from opgraft.ops.rotary.modules import (
    TRITON,
    RotaryEmbedding,
    RotaryEmbeddingBase,
    cos_sin_table,
    inverse_frequencies,
    moved,
    rotated_by,
)
from torch import Tensor

__all__ = [
    "DynamicNTKAlphaRotaryEmbedding",
    "DynamicNTKScalingRotaryEmbedding",
    "LinearScalingRotaryEmbedding",
    "NTKScalingRotaryEmbedding",
    "Phi3LongRoPEScaledRotaryEmbedding",
]

_OP = "rotary_embedding"


def _stretched(base: float, by: float, rotary_dim: int) -> float:
    """Return a base for a slowest pair ``by`` times slower, and the fastest pair as before."""
    expect_positive(_OP, "what the base is stretched by", by)
    if rotary_dim < 4:
        raise ValueError(
            f"{_OP}: rotary_dim is {rotary_dim}, expected at least 4 where the base is stretched"
        )
    exponent = rotary_dim / (rotary_dim - 2)
    return float(base * by**exponent)


class LinearScalingRotaryEmbedding(RotaryEmbedding):
    """The rotary embedding with positions divided by a factor (Chen et al., arXiv:2306.15595).

    With several factors, the tables follow each other, each of ``max_position_embeddings · factor``
    rows. Callers add the offset of a factor to positions, see ``scaling_factor_to_offset``.

    Args:
        max_position_embeddings: positions of the model's first training.
        scaling_factors: one factor or several.

    The other arguments are those of ``RotaryEmbeddingBase``.
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        scaling_factors: Sequence[float] | float,
        dtype: torch.dtype,
    ) -> None:
        if isinstance(scaling_factors, (int, float)):
            scaling_factors = [scaling_factors]
        self.scaling_factors: list[float] = list(scaling_factors)
        for factor in self.scaling_factors:
            expect_positive(_OP, "scaling_factors", factor)
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)

    def _rows_of_tables(self) -> list[int]:
        return [math.ceil(self.max_position_embeddings * factor) for factor in self.scaling_factors]

    @property
    def scaling_factor_to_offset(self) -> dict[float, int]:
        """The first row of each factor in the joint table."""
        offsets = {}
        first = 0
        for factor, rows in zip(self.scaling_factors, self._rows_of_tables(), strict=True):
            offsets[float(factor)] = first
            first += rows
        return offsets

    def _compute_cos_sin_cache(self) -> Tensor:
        inv_freq = self._compute_inv_freq(self.base)
        tables = []
        for factor, rows in zip(self.scaling_factors, self._rows_of_tables(), strict=True):
            tables.append(cos_sin_table(inv_freq / factor, rows))
        return torch.cat(tables)


class NTKScalingRotaryEmbedding(RotaryEmbedding):
    """The rotary embedding with a greater base, fixed or mixed (https://kexue.fm/archives/9706).

    In the fixed form, the base is multiplied by ``scaling_factor``, and each frequency divided by
    ``scaling_factor^(2 / rotary_dim)``. In the mixed form, frequency ``m``, counted from 1, is
    divided by ``exp(a · m^mixed_b)``; ``a`` makes the last divisor ``scaling_factor``.

    Args:
        scaling_factor: the length of the context, as a multiple of the trained one.
        mixed_b: the exponent of the mixed form; ``None`` for the fixed form.

    The other arguments are those of ``RotaryEmbeddingBase``.
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        scaling_factor: float,
        dtype: torch.dtype,
        mixed_b: float | None = None,
    ) -> None:
        expect_positive(_OP, "scaling_factor", scaling_factor)
        self.scaling_factor = scaling_factor
        self.mixed_b = mixed_b
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)

    def _compute_inv_freq(self, base: float) -> Tensor:
        if self.mixed_b is None:
            slower = float(self.scaling_factor ** (2 / self.rotary_dim))
            return super()._compute_inv_freq(base * self.scaling_factor) / slower

        inv_freq = super()._compute_inv_freq(base)
        pairs = self.rotary_dim // 2
        order = torch.arange(1, pairs + 1, dtype=inv_freq.dtype) / pairs
        exponents = math.log(self.scaling_factor) * torch.pow(order, self.mixed_b)
        return inv_freq / torch.exp(exponents)


class DynamicNTKScalingRotaryEmbedding(RotaryEmbedding):
    """The rotary embedding with a base that grows with the context.

    This is transformers' rope type ``dynamic``. The base is multiplied by
    ``(f · n / t - (f - 1))^(d / (d - 2))`` with ``f = scaling_factor``,
    ``n = max_position_embeddings``, ``t = max_trained_positions``, ``d = rotary_dim``. Up to ``t``
    positions, the base stays. The first table is for the longest context. ``fit_context`` makes the
    table anew for another context. After ``fit_tokens``, each token has a context of its own.

    Args:
        max_position_embeddings: positions of the table.
        max_trained_positions: positions of the model's first training.
        scaling_factor: the growth of the base.

    The other arguments are those of ``RotaryEmbeddingBase``.
    """

    gradual: ClassVar[bool] = True

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        max_trained_positions: int,
        base: float,
        is_neox_style: bool,
        scaling_factor: float,
        dtype: torch.dtype,
    ) -> None:
        expect_positive(_OP, "scaling_factor", scaling_factor)
        expect_positive(_OP, "max_trained_positions", max_trained_positions)
        self.scaling_factor = scaling_factor
        self.max_trained_positions = max_trained_positions
        self.context = max_position_embeddings

        # Rows of a table for the tokens of the next calls, and that table.
        self._tokens: tuple[Tensor, Tensor] | None = None
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)

    def fit_context(self, length: int) -> None:
        """Rotate for a context of ``length`` positions, at most ``max_position_embeddings``."""
        self._tokens = None
        context = max(self.max_trained_positions, min(length, self.max_position_embeddings))
        if context == self.context:
            return

        self.context = context
        # Later calls may need gradients.
        with torch.inference_mode(False):
            self.cos_sin_cache = self._compute_cos_sin_cache().to(self.cos_sin_cache)

    @property
    def trained_positions(self) -> int:
        """The number of positions without a change of the base."""
        return self.max_trained_positions

    def fit_tokens(self, positions: Tensor, lengths: Tensor) -> None:
        """Rotate each token of the next calls for a context of its own length.

        Args:
            positions: the positions of the tokens, integers ``[tokens]``. The next calls must have
                equal positions.
            lengths: the lengths of the contexts, ``[tokens]``.
        """
        device = positions.device
        dtype = compute_dtype(self.dtype)
        # Not in float64, which some devices lack.
        longer = (lengths.to(dtype) / self.max_trained_positions).clamp(min=1.0)
        stretch = self.scaling_factor * longer - (self.scaling_factor - 1)
        base = self.base * stretch ** (self.rotary_dim / (self.rotary_dim - 2))

        exponents = torch.arange(0, self.rotary_dim, 2, dtype=dtype, device=device)
        exponents = exponents / self.rotary_dim

        angles = positions[:, None] / torch.pow(base[:, None], exponents)
        table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(self.cos_sin_cache.dtype)
        rows = torch.arange(len(positions), device=device)
        self._tokens = (rows, table)

    @calls_functional
    def forward_native(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor | None = None,
        *,
        functional: Any = NATIVE,
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate as ``RotaryEmbeddingBase`` does, from its table or the table of ``fit_tokens``."""
        rows, table = positions, self.cos_sin_cache
        if self._tokens is not None:
            rows, table = self._tokens
        return rotated_by(
            functional.rotary_embedding, rows, query, key, self.head_size, table, self.is_neox_style
        )

    # Makes forward_cuda and forward_xpu.
    functional_cuda = functional_xpu = TRITON

    def _compute_cos_sin_cache(self) -> Tensor:
        longer = max(1.0, self.context / self.max_trained_positions)
        stretch = self.scaling_factor * longer - (self.scaling_factor - 1)
        base = _stretched(self.base, stretch, self.rotary_dim)
        return cos_sin_table(self._compute_inv_freq(base), self.max_position_embeddings)


class DynamicNTKAlphaRotaryEmbedding(RotaryEmbedding):
    """The rotary embedding of Hunyuan, with a greater base.

    The base is multiplied by ``scaling_alpha^(rotary_dim / (rotary_dim - 2))``.

    Args:
        scaling_alpha: the factor by which the slowest pair turns slower.

    The other arguments are those of ``RotaryEmbeddingBase``.
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        scaling_alpha: float,
        dtype: torch.dtype,
    ) -> None:
        self.scaling_alpha = scaling_alpha
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)

    def _compute_cos_sin_cache(self) -> Tensor:
        base = _stretched(self.base, self.scaling_alpha, self.rotary_dim)
        return cos_sin_table(self._compute_inv_freq(base), self.max_position_embeddings)


class Phi3LongRoPEScaledRotaryEmbedding(RotaryEmbeddingBase):
    """The rotary embedding of Phi-3, LongRoPE: factors for short contexts, others for long ones.

    Ding et al., arXiv:2402.13753. Each pair has a short and a long factor. The buffer
    ``long_short_cos_sin_cache`` replaces ``cos_sin_cache``: ``original_max_position_embeddings``
    rows with the short factors, then ``max_position_embeddings`` rows with the long ones.

    The attribute ``use_long_rope`` picks the factors; at first, true if the model takes more
    positions than in its first training. A sequence must keep its factors, as keys in a cache stay
    rotated. ``fit_context`` picks by the length of one context, ``fit_tokens`` for each token.

    Args:
        original_max_position_embeddings: positions of the model's first training.
        is_neox_style: must be ``True``.
        short_factor: the divisors of the frequencies in a short context, one for each pair.
        long_factor: the divisors in a long context.
        short_mscale: multiplies cosines and sines in a short context; by default
            ``√(1 + ln(n / t) / ln(t))`` for ``n`` positions, ``t`` of them trained, and 1 if
            ``n ≤ t``.
        long_mscale: as ``short_mscale``, for a long context.

    The other arguments are those of ``RotaryEmbeddingBase``.

    Raises:
        ValueError: ``is_neox_style`` is false, the factors are not one for each pair, or as
            ``RotaryEmbeddingBase``.
    """

    long_short_cos_sin_cache: Tensor
    gradual: ClassVar[bool] = False

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        original_max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype,
        short_factor: Sequence[float],
        long_factor: Sequence[float],
        short_mscale: float | None = None,
        long_mscale: float | None = None,
    ) -> None:
        if not is_neox_style:
            raise ValueError(f"{_OP}: is_neox_style is {is_neox_style}, expected True for LongRoPE")

        super().__init__(
            head_size,
            rotary_dim,
            max_position_embeddings,
            base,
            is_neox_style,
            dtype,
            init_cache=False,
        )
        expect_positive(_OP, "original_max_position_embeddings", original_max_position_embeddings)
        for name, factors in (("short_factor", short_factor), ("long_factor", long_factor)):
            if len(factors) != rotary_dim // 2:
                raise ValueError(
                    f"{_OP}: {name} has {len(factors)} factors, expected {rotary_dim // 2}"
                )

        self.original_max_position_embeddings = original_max_position_embeddings
        self.short_factor = list(short_factor)
        self.long_factor = list(long_factor)
        self.use_long_rope: bool | Tensor = (
            max_position_embeddings > original_max_position_embeddings
        )

        longer = max_position_embeddings / original_max_position_embeddings
        scale = longrope_scale(longer, original_max_position_embeddings)
        self.short_mscale = scale if short_mscale is None else short_mscale
        self.long_mscale = scale if long_mscale is None else long_mscale

        short = self._compute_cos_sin_cache(
            original_max_position_embeddings, self.short_factor, self.short_mscale
        )
        long = self._compute_cos_sin_cache(
            max_position_embeddings, self.long_factor, self.long_mscale
        )

        table = torch.cat((short, long)).to(dtype)
        self.register_buffer("long_short_cos_sin_cache", table, persistent=False)

    @property
    def trained_positions(self) -> int:
        """The number of positions with the short factors."""
        return self.original_max_position_embeddings

    def fit_tokens(self, positions: Tensor, lengths: Tensor) -> None:
        """Pick the factors of each token in the next calls by the length of its context.

        Args:
            positions: not read.
            lengths: the lengths of the contexts, ``[tokens]``.
        """
        self.use_long_rope = lengths > self.original_max_position_embeddings

    def fit_context(self, length: int) -> None:
        """Pick the factors for a context of ``length`` positions."""
        length = min(length, self.max_position_embeddings)
        self.use_long_rope = length > self.original_max_position_embeddings

    # The names and arguments of this method and the next are vLLM's.
    def _compute_inv_freq(  # type: ignore[override]
        self, rescale_factors: Sequence[float]
    ) -> Tensor:
        plain = inverse_frequencies(self.base, self.rotary_dim, self.dtype)
        return plain / torch.tensor(rescale_factors, dtype=plain.dtype)

    def _compute_cos_sin_cache(  # type: ignore[override]
        self, max_position_embeddings: int, rescale_factors: Sequence[float], mscale: float
    ) -> Tensor:
        inv_freq = self._compute_inv_freq(rescale_factors)
        return cos_sin_table(inv_freq, max_position_embeddings, mscale)

    @calls_functional
    def forward_native(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor | None = None,
        offsets: Tensor | None = None,
        *,
        functional: Any = NATIVE,
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate as ``RotaryEmbeddingBase`` does, at ``positions + offsets``."""
        trained = self.original_max_position_embeddings
        table = self.long_short_cos_sin_cache
        if isinstance(self.use_long_rope, Tensor):
            # The rows of the long factors lie behind the `trained` rows of the short ones.
            positions = positions + self.use_long_rope * trained
        else:
            table = table[trained:] if self.use_long_rope else table[:trained]

        return rotated_by(
            functional.rotary_embedding,
            moved(positions, offsets),
            query,
            key,
            self.head_size,
            table,
            self.is_neox_style,
        )

    # Makes forward_cuda and forward_xpu.
    functional_cuda = functional_xpu = TRITON


def longrope_scale(longer: float, trained: int) -> float:
    """Return the scale of cosines and sines for a context of ``longer · trained`` positions."""
    if longer <= 1.0:
        return 1.0
    return math.sqrt(1.0 + math.log(longer) / math.log(trained))
