"""Variants of the rotary embedding: other frequencies, and positions along several axes.

All have the buffer ``cos_sin_cache`` of ``RotaryEmbeddingBase``. The buffer moves with the module
and is not saved. Some variants add ``offsets`` to ``positions``: integers that broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from opgraft.binding.derivation import NATIVE, calls_functional
from opgraft.ops.checks import expect_positive
from opgraft.ops.rotary import functional as forms
from opgraft.ops.rotary.modules import (
    TRITON,
    RotaryEmbedding,
    RotaryEmbeddingBase,
    cos_sin_table,
    inverse_frequencies,
    moved,
    rotated_by,
)
from opgraft.registry.signatures import called_with
from torch import Tensor

__all__ = [
    "DeepseekScalingRotaryEmbedding",
    "Llama3RotaryEmbedding",
    "MRotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
    "apply_interleaved_rope",
]

_OF_SOME_VERSIONS = (
    "extrapolation_factor",
    "attn_factor",
    "apply_yarn_scaling",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "truncate",
)
"""Parameters of YaRN in some versions of vLLM. Constructors of plugins may have or lack them."""


def _slowed(inv_freq: Tensor, kept: Tensor, factor: float) -> Tensor:
    """Divide frequencies by ``factor``, but for the share ``kept`` of each.

    A frequency with the share 1 stays exactly the same.
    """
    loss = (1.0 - kept) * (1.0 - 1.0 / factor)
    return inv_freq * (1.0 - loss)


class Llama3RotaryEmbedding(RotaryEmbedding):
    """The rotary embedding of Llama 3.1, with low frequencies slowed down (arXiv:2407.21783).

    A low frequency turns at most ``low_freq_factor`` times within ``orig_max_position``, and is
    divided by ``scaling_factor``. A high frequency turns at least ``high_freq_factor`` times, and
    stays. The frequencies between go over linearly.

    Args:
        scaling_factor: the divisor of low frequencies.
        low_freq_factor: the most turns of a low frequency.
        high_freq_factor: the fewest turns of a high frequency.
        orig_max_position: positions of the model's first training.

    The other arguments are those of ``RotaryEmbeddingBase``.

    Raises:
        ValueError: ``high_freq_factor`` is not above ``low_freq_factor``, or as
            ``RotaryEmbeddingBase``.
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype,
        scaling_factor: float,
        low_freq_factor: float,
        high_freq_factor: float,
        orig_max_position: int,
    ) -> None:
        if high_freq_factor <= low_freq_factor:
            raise ValueError(
                f"rotary_embedding: high_freq_factor is {high_freq_factor}, expected more than "
                f"low_freq_factor={low_freq_factor}"
            )

        expect_positive("rotary_embedding", "scaling_factor", scaling_factor)
        self.scaling_factor = scaling_factor
        self.low_freq_factor = low_freq_factor
        self.high_freq_factor = high_freq_factor
        self.orig_max_position = orig_max_position
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)

    def _compute_inv_freq(self, base: float) -> Tensor:
        inv_freq = super()._compute_inv_freq(base)
        turns = self.orig_max_position * inv_freq / (2.0 * math.pi)
        transition = self.high_freq_factor - self.low_freq_factor
        kept = (turns - self.low_freq_factor) / transition
        return _slowed(inv_freq, kept.clamp(0.0, 1.0), self.scaling_factor)


class _YaRNTable:
    """Frequencies and table of YaRN (arXiv:2309.00071).

    A fast pair turns at least ``beta_fast`` times within ``max_position_embeddings``, and keeps its
    frequency. A slow pair turns at most ``beta_slow`` times: its frequency is divided by
    ``scaling_factor``. The pairs between go over linearly by index. Cosines and sines are
    multiplied by ``mscale``.
    """

    base: float
    rotary_dim: int
    max_position_embeddings: int
    dtype: torch.dtype
    # Defaults, as the constructor of a replacement may call RotaryEmbeddingBase alone.
    scaling_factor: float | None = None
    extrapolation_factor: float = 1.0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float = 1.0

    def _set_yarn(
        self,
        scaling_factor: float | None,
        extrapolation_factor: float,
        attn_factor: float,
        beta_fast: float,
        beta_slow: float,
        truncate: bool = True,
    ) -> None:
        """Keep the arguments. Call this before the constructor of the op computes the table."""
        if scaling_factor is not None:
            expect_positive("rotary_embedding", "scaling_factor", scaling_factor)
        self.scaling_factor = scaling_factor
        self.extrapolation_factor = extrapolation_factor
        self.attn_factor = attn_factor
        self.beta_fast = beta_fast
        self.beta_slow = beta_slow
        self.truncate = truncate

    @property
    def _factor(self) -> float:
        return self.scaling_factor or 1.0

    @property
    def _trained_positions(self) -> int:
        """Rows of the table for a factor of 1."""
        return self.max_position_embeddings

    def _pair_that_turns(self, times: float) -> float:
        """Return the index of the pair that turns so often; between two pairs, a fraction."""
        turned = math.log(self.max_position_embeddings / (times * 2.0 * math.pi))
        return self.rotary_dim * turned / (2.0 * math.log(self.base))

    def _compute_inv_freq(self, scaling_factor: float) -> Tensor:
        """Return ``θ`` with low frequencies divided by ``scaling_factor``: ``[rotary_dim / 2]``.

        An op without a scaling factor passes the base instead, as ``RotaryEmbeddingBase`` does.
        """
        if self.scaling_factor is None:
            return inverse_frequencies(scaling_factor, self.rotary_dim, self.dtype)

        inv_freq = inverse_frequencies(self.base, self.rotary_dim, self.dtype)
        low = self._pair_that_turns(self.beta_fast)
        high = self._pair_that_turns(self.beta_slow)

        if self.truncate:
            low = math.floor(low)
            high = math.ceil(high)
        low = max(low, 0)
        high = min(high, self.rotary_dim - 1)

        # With both ends at one pair, a step takes the place of the ramp.
        width = high - low or 0.001
        ramp = (torch.arange(len(inv_freq), dtype=inv_freq.dtype) - low) / width
        kept = (1.0 - ramp.clamp(0.0, 1.0)) * self.extrapolation_factor
        return _slowed(inv_freq, kept, scaling_factor)

    def _compute_cos_sin_cache(self) -> Tensor:
        rows = math.ceil(self._trained_positions * self._factor)
        argument = self.base if self.scaling_factor is None else self.scaling_factor
        return cos_sin_table(self._compute_inv_freq(argument), rows, self.mscale)


def _yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's factor of cosines and sines; attention scores grow by the square."""
    if factor <= 1.0:
        return 1.0
    return 0.1 * mscale * math.log(factor) + 1.0


def _table_scale(
    factor: float, mscale: float | None, mscale_all_dim: float | None, given: float | None
) -> float:
    """Return the factor of a table: the given one, the ratio of two scales, or YaRN's own."""
    if given is not None:
        return float(given)
    if mscale and mscale_all_dim:
        return _yarn_scale(factor, mscale) / _yarn_scale(factor, mscale_all_dim)
    return _yarn_scale(factor)


class YaRNScalingRotaryEmbedding(_YaRNTable, RotaryEmbedding):
    """The rotary embedding with the frequencies of YaRN (Peng et al., arXiv:2309.00071).

    The table has ``max_position_embeddings · scaling_factor`` rows, multiplied by ``mscale``.

    Args:
        max_position_embeddings: positions of the model's first training.
        scaling_factor: the divisor of low frequencies.
        extrapolation_factor: the share of a high frequency that stays.
        attn_factor: multiplies cosines and sines, besides YaRN's own scale.
        beta_fast: the fewest turns of a high frequency.
        beta_slow: the most turns of a low frequency.
        apply_yarn_scaling: apply YaRN's own scale, ``0.1 · ln(scaling_factor) + 1``.
        mscale: with ``mscale_all_dim``, YaRN's own scale is ``s(mscale) / s(mscale_all_dim)`` with
            ``s(m) = 0.1 · m · ln(scaling_factor) + 1``.
        mscale_all_dim: see ``mscale``.
        attention_factor: replaces YaRN's own scale.
        truncate: begin and end the transition at whole pairs.

    The other arguments are those of ``RotaryEmbeddingBase``.
    """

    @called_with(never=_OF_SOME_VERSIONS)
    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        scaling_factor: float,
        dtype: torch.dtype,
        *,
        extrapolation_factor: float = 1,
        attn_factor: float = 1,
        beta_fast: float = 32,
        beta_slow: float = 1,
        apply_yarn_scaling: bool = True,
        mscale: float | None = None,
        mscale_all_dim: float | None = None,
        attention_factor: float | None = None,
        truncate: bool = True,
    ) -> None:
        self._set_yarn(
            scaling_factor, extrapolation_factor, attn_factor, beta_fast, beta_slow, truncate
        )
        scale = 1.0
        if apply_yarn_scaling:
            scale = _table_scale(scaling_factor, mscale, mscale_all_dim, attention_factor)
        self.mscale = attn_factor * scale
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)


class DeepseekScalingRotaryEmbedding(_YaRNTable, RotaryEmbeddingBase):
    """The rotary embedding of DeepSeek-V2: YaRN with two scales.

    Sources: arXiv:2405.04434, arXiv:2309.00071. The attribute ``mscale`` multiplies the table:
    ``s(mscale) / s(mscale_all_dim) · attn_factor``, with
    ``s(m) = 0.1 · m · ln(scaling_factor) + 1``.

    Args:
        mscale: for the rotated part of a head.
        mscale_all_dim: for the whole head; the model's softmax scale contains this one.
        init_cache: as for ``RotaryEmbeddingBase``.

    The other arguments are those of ``YaRNScalingRotaryEmbedding``.
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
        *,
        extrapolation_factor: float = 1,
        attn_factor: float = 1,
        beta_fast: float = 32,
        beta_slow: float = 1,
        mscale: float = 1,
        mscale_all_dim: float = 0,
        init_cache: bool = True,
    ) -> None:
        self._set_yarn(scaling_factor, extrapolation_factor, attn_factor, beta_fast, beta_slow)
        of_rotated = _yarn_scale(scaling_factor, mscale)
        of_all = _yarn_scale(scaling_factor, mscale_all_dim)
        self.mscale = of_rotated / of_all * attn_factor
        super().__init__(
            head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype, init_cache
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
        positions = moved(positions, offsets)
        return super().forward_native(positions, query, key, functional=functional)

    # Makes forward_cuda and forward_xpu.
    functional_cuda = functional_xpu = TRITON


def apply_interleaved_rope(x: Tensor, mrope_section: Sequence[int]) -> Tensor:
    """Merge cosines, or sines, of three axes, as pairs take turns.

    Args:
        x: ``[3, ..., pairs]``, by time, height and width.
        mrope_section: as for ``MRotaryEmbedding``.

    Returns:
        ``[..., pairs]``.
    """
    by_time = x[0]
    by_height = x[1]
    by_width = x[2]

    pair = torch.arange(x.shape[-1], device=x.device)
    is_height = (pair % 3 == 1) & (pair < 3 * mrope_section[1])
    is_width = (pair % 3 == 2) & (pair < 3 * mrope_section[2])

    merged = torch.where(is_height, by_height, by_time)
    return torch.where(is_width, by_width, merged)


class MRotaryEmbedding(_YaRNTable, RotaryEmbeddingBase):
    """Rotary embedding by positions in time, height and width (Qwen2-VL, arXiv:2409.12191).

    The table has ``positions_factor · max_position_embeddings · scaling_factor`` rows, as the
    positions of a video grow with its duration. With a ``scaling_factor``, the frequencies are
    those of YaRN, for a training with ``max_position_embeddings`` positions; vLLM computes with
    ``positions_factor`` times as many.

    Args:
        mrope_section: the numbers of pairs for time, height and width; together
            ``rotary_dim / 2``. Without sections, the op takes positions as
            ``RotaryEmbeddingBase`` does.
        mrope_interleaved: pairs take turns, as in Qwen3-VL; otherwise the sections follow each
            other.
        positions_factor: the reach of positions, as a multiple of ``max_position_embeddings``.
        scaling_factor: as for YaRN; without a factor, frequencies are plain.

    The other arguments are those of ``YaRNScalingRotaryEmbedding``.

    Raises:
        ValueError: the sections do not share out the pairs of a head, or as
            ``RotaryEmbeddingBase``.
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype,
        mrope_section: list[int] | None = None,
        mrope_interleaved: bool = False,
        *,
        positions_factor: int = 4,
        scaling_factor: float | None = None,
        extrapolation_factor: float = 1,
        attn_factor: float = 1,
        beta_fast: float = 32,
        beta_slow: float = 1,
        mscale: float | None = None,
        mscale_all_dim: float | None = None,
        attention_factor: float | None = None,
        truncate: bool = True,
    ) -> None:
        if mrope_section is not None:
            forms.expect_sections(mrope_section, rotary_dim, mrope_interleaved)
        self.mrope_section = mrope_section
        self.mrope_interleaved = mrope_interleaved
        self.cache_max_position_num = positions_factor * max_position_embeddings

        self._set_yarn(
            scaling_factor, extrapolation_factor, attn_factor, beta_fast, beta_slow, truncate
        )
        if scaling_factor is not None:
            scale = _table_scale(scaling_factor, mscale, mscale_all_dim, attention_factor)
            self.mscale = attn_factor * scale
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)

    @property
    def _trained_positions(self) -> int:
        return self.cache_max_position_num

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
        """Rotate query and key, in their shapes; a key of ``None`` stays ``None``.

        Args:
            positions: integers ``[3, num_tokens]``; for text, ``[num_tokens]``.
            query: as for ``RotaryEmbeddingBase``.
            key: as for ``RotaryEmbeddingBase``.
            offsets: added to ``positions``.

        Raises:
            ValueError: as ``RotaryEmbeddingBase``.
        """
        positions = moved(positions, offsets)
        if self.mrope_section is None or positions.dim() == 1:
            return super().forward_native(positions, query, key, functional=functional)

        return rotated_by(
            functional.mrope,
            positions,
            query,
            key,
            self.head_size,
            self.cos_sin_cache,
            self.mrope_section,
            self.is_neox_style,
            self.mrope_interleaved,
        )

    # Makes forward_cuda and forward_xpu.
    functional_cuda = functional_xpu = TRITON
