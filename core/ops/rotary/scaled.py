"""Variants of the rotary embedding for longer contexts: slower positions, another base, or factors for each pair."""

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

_OP = "rotary_embedding"


def _stretched(base: float, by: float, rotary_dim: int) -> float:
    """Return the base with which the slowest pair turns ``by`` times slower and the fastest as before."""
    expect_positive(_OP, "what the base is stretched by", by)
    if rotary_dim < 4:
        raise ValueError(
            f"{_OP}: rotary_dim is {rotary_dim}, expected at least 4 where the base is stretched"
        )
    return float(base * by ** (rotary_dim / (rotary_dim - 2)))


class LinearScalingRotaryEmbedding(RotaryEmbedding):
    """The rotary embedding with positions divided by a factor (Chen et al., arXiv:2306.15595).

    For several factors the tables follow each other, each ``max_position_embeddings · factor`` rows. Callers add what
    ``scaling_factor_to_offset`` says to their positions.

    Args:
        max_position_embeddings: positions that the model was first trained for.
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
        factors = (
            [scaling_factors]
            if isinstance(scaling_factors, (int, float))
            else list(scaling_factors)
        )
        for factor in factors:
            expect_positive(_OP, "scaling_factors", factor)
        self.scaling_factors: list[float] = factors
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)

    def _rows(self) -> list[int]:
        return [math.ceil(self.max_position_embeddings * factor) for factor in self.scaling_factors]

    @property
    def scaling_factor_to_offset(self) -> dict[float, int]:
        """The row of the table where the positions of each factor begin."""
        rows = self._rows()
        return {float(factor): sum(rows[:i]) for i, factor in enumerate(self.scaling_factors)}

    def _compute_cos_sin_cache(self) -> Tensor:
        inv_freq = self._compute_inv_freq(self.base)
        factors = zip(self.scaling_factors, self._rows(), strict=True)
        return torch.cat([cos_sin_table(inv_freq / factor, rows) for factor, rows in factors])


class NTKScalingRotaryEmbedding(RotaryEmbedding):
    """The rotary embedding with a greater base, fixed or mixed (https://kexue.fm/archives/9706).

    Fixed, the base is multiplied by ``scaling_factor`` and each frequency divided by ``scaling_factor^(2 /
    rotary_dim)``. Mixed, frequency ``m``, counted from 1, is divided by ``exp(a · m^mixed_b)``, with ``a`` such that
    the last one is divided by ``scaling_factor``.

    Args:
        scaling_factor: how many times longer the context is.
        mixed_b: the exponent of the mixed form; fixed without it.

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
        return inv_freq / torch.exp(math.log(self.scaling_factor) * torch.pow(order, self.mixed_b))


class DynamicNTKScalingRotaryEmbedding(RotaryEmbedding):
    """The rotary embedding with a base that grows with the context, as transformers' rope type ``dynamic`` has it.

    The base is multiplied by ``(f · n / t - (f - 1))^(d / (d - 2))`` with ``f = scaling_factor``, ``n =
    max_position_embeddings``, ``t = max_trained_positions``, ``d = rotary_dim``; up to ``t`` positions the base stays.
    The table is first made for the longest context. ``fit_context`` makes it anew for another one, ``fit_tokens`` has
    each token rotated for a context of its own.

    Args:
        max_position_embeddings: positions that the table is for.
        max_trained_positions: positions that the model was first trained for.
        scaling_factor: how fast the base grows.

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
        self._own: tuple[Tensor, Tensor] | None = None
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)

    def fit_context(self, length: int) -> None:
        """Rotate as a context of ``length`` positions asks for, at most ``max_position_embeddings``."""
        self._own = None
        context = max(self.max_trained_positions, min(length, self.max_position_embeddings))
        if context != self.context:
            self.context = context
            with torch.inference_mode(False):  # later calls may need gradients
                self.cos_sin_cache = self._compute_cos_sin_cache().to(self.cos_sin_cache)

    @property
    def trained_positions(self) -> int:
        """Return the positions up to which the base stays."""
        return self.max_trained_positions

    def fit_tokens(self, positions: Tensor, lengths: Tensor) -> None:
        """Rotate the tokens of the next calls each for a context of its own length.

        Args:
            positions: of those tokens, integers ``[tokens]``; the next calls must have the same.
            lengths: ``[tokens]``, of the context of each.
        """
        longer = self.scaling_factor * (lengths.double() / self.max_trained_positions).clamp(
            min=1.0
        )
        base = self.base * (longer - (self.scaling_factor - 1)) ** (
            self.rotary_dim / (self.rotary_dim - 2)
        )
        dtype = compute_dtype(self.dtype)
        exponents = (
            torch.arange(0, self.rotary_dim, 2, dtype=dtype, device=positions.device)
            / self.rotary_dim
        )
        angles = positions[:, None] / torch.pow(base.to(dtype)[:, None], exponents)
        rows = torch.cat((angles.cos(), angles.sin()), dim=-1).to(self.cos_sin_cache.dtype)
        self._own = torch.arange(len(positions), device=positions.device), rows

    @calls_functional
    def forward_native(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor | None = None,
        *,
        functional: Any = NATIVE,
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate as ``RotaryEmbeddingBase`` does, from the table or from rows of the tokens' own."""
        rows, table = (positions, self.cos_sin_cache) if self._own is None else self._own
        return rotated_by(
            functional.rotary_embedding, rows, query, key, self.head_size, table, self.is_neox_style
        )

    functional_cuda = functional_xpu = TRITON  # makes forward_cuda, forward_xpu

    def _compute_cos_sin_cache(self) -> Tensor:
        longer = self.scaling_factor * max(1.0, self.context / self.max_trained_positions)
        base = _stretched(self.base, longer - (self.scaling_factor - 1), self.rotary_dim)
        return cos_sin_table(self._compute_inv_freq(base), self.max_position_embeddings)


class DynamicNTKAlphaRotaryEmbedding(RotaryEmbedding):
    """The rotary embedding of Hunyuan: the base times ``scaling_alpha^(rotary_dim / (rotary_dim - 2))``.

    Args:
        scaling_alpha: how much slower the slowest pair turns.

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
    """The rotary embedding of Phi-3, LongRoPE: a factor for each pair, for short and for long contexts
    (Ding et al., arXiv:2402.13753).

    The buffer ``long_short_cos_sin_cache`` has ``original_max_position_embeddings`` rows with the short factors, then
    ``max_position_embeddings`` rows with the long ones. It takes the place of ``cos_sin_cache``. Which ones count is
    the attribute ``use_long_rope``, at first whether there are more positions than the model was first trained for: a
    sequence must not change from one to the other, as keys in a cache stay rotated as they were. ``fit_context``
    sets it for the length of a context, ``fit_tokens`` for each token by itself.

    Args:
        original_max_position_embeddings: positions that the model was first trained for.
        is_neox_style: ``True``; there is no other.
        short_factor: what each frequency is divided by in a short context, ``rotary_dim / 2`` of them.
        long_factor: likewise in a long one.
        short_mscale: multiplies cosines and sines in a short context; ``√(1 + ln(n / t) / ln(t))`` if not given, with
            ``n`` positions for ``t`` original ones, and 1 if ``n ≤ t``.
        long_mscale: likewise in a long one.

    The other arguments are those of ``RotaryEmbeddingBase``.

    Raises:
        ValueError: ``is_neox_style`` is false, the factors are not one for each pair, or as ``RotaryEmbeddingBase``.
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
        self.short_factor, self.long_factor = list(short_factor), list(long_factor)
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
        self.register_buffer(
            "long_short_cos_sin_cache", torch.cat((short, long)).to(dtype), persistent=False
        )

    @property
    def trained_positions(self) -> int:
        """Return the positions up to which the short factors hold."""
        return self.original_max_position_embeddings

    def fit_tokens(self, positions: Tensor, lengths: Tensor) -> None:
        """Take the factors for the tokens of the next calls that a context of the length of each asks for."""
        self.use_long_rope = lengths > self.original_max_position_embeddings

    def fit_context(self, length: int) -> None:
        """Take the factors that a context of ``length`` positions asks for, at most ``max_position_embeddings``."""
        self.use_long_rope = (
            min(length, self.max_position_embeddings) > self.original_max_position_embeddings
        )

    def _compute_inv_freq(self, rescale_factors: Sequence[float]) -> Tensor:  # type: ignore[override]  # vLLM's name
        plain = inverse_frequencies(self.base, self.rotary_dim, self.dtype)
        return plain / torch.tensor(rescale_factors, dtype=plain.dtype)

    def _compute_cos_sin_cache(  # type: ignore[override]  # vLLM's name
        self, max_position_embeddings: int, rescale_factors: Sequence[float], mscale: float
    ) -> Tensor:
        return cos_sin_table(
            self._compute_inv_freq(rescale_factors), max_position_embeddings, mscale
        )

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
        trained, table = self.original_max_position_embeddings, self.long_short_cos_sin_cache
        if isinstance(self.use_long_rope, Tensor):
            positions = positions + self.use_long_rope * trained
        else:
            table = table[trained:] if self.use_long_rope else table[:trained]
        settings = (self.head_size, table, self.is_neox_style)
        return rotated_by(
            functional.rotary_embedding, moved(positions, offsets), query, key, *settings
        )

    functional_cuda = functional_xpu = TRITON  # makes forward_cuda, forward_xpu


def longrope_scale(longer: float, trained: int) -> float:
    """Compute the scale of cosines and sines for a context ``longer`` times that of ``trained`` positions."""
    return 1.0 if longer <= 1.0 else math.sqrt(1.0 + math.log(longer) / math.log(trained))
