"""Variants of the rotary embedding: other frequencies, and positions along several axes.

All have the buffer ``cos_sin_cache`` of ``RotaryEmbeddingBase``, which moves with the module and is not saved with it.
Where a variant takes ``offsets``, integers that broadcast to ``positions``, they are added to them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from opgraft.binding.derivation import NATIVE, calls_functional
from opgraft.ops.checks import expect_positive
from opgraft.ops.rotary import functional
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

_OF_SOME_VERSIONS = (
    "extrapolation_factor",
    "attn_factor",
    "apply_yarn_scaling",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "truncate",
)
"""Parameters of YaRN that constructors of plugins have or lack by the version of vLLM that they were written for."""


def _slowed(inv_freq: Tensor, kept: Tensor, factor: float) -> Tensor:
    """Divide frequencies by ``factor``, save for the share ``kept`` of each; where that is 1, they stay exactly."""
    return inv_freq * (1.0 - (1.0 - kept) * (1.0 - 1.0 / factor))


class Llama3RotaryEmbedding(RotaryEmbedding):
    """The rotary embedding of Llama 3.1, slowed where a context of training sees less than a turn (arXiv:2407.21783).

    A frequency that turns at most ``low_freq_factor`` times within ``orig_max_position`` is divided by
    ``scaling_factor``, one that turns at least ``high_freq_factor`` times stays, those between go over linearly.

    Args:
        scaling_factor: what low frequencies are divided by.
        low_freq_factor: turns up to which a frequency is low.
        high_freq_factor: turns from which it is high.
        orig_max_position: positions that the model was first trained for.

    The other arguments are those of ``RotaryEmbeddingBase``.

    Raises:
        ValueError: ``high_freq_factor`` is not above ``low_freq_factor``, or as ``RotaryEmbeddingBase``.
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
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return _slowed(inv_freq, kept.clamp(0.0, 1.0), self.scaling_factor)


class _YaRNTable:
    """Frequencies and table of YaRN (arXiv:2309.00071), for the variants that have them.

    A pair that turns at least ``beta_fast`` times within ``max_position_embeddings`` keeps its frequency, one that
    turns at most ``beta_slow`` times has it divided by ``scaling_factor``, those between go over linearly by their
    index. Cosines and sines are multiplied by ``mscale``.
    """

    base: float
    rotary_dim: int
    max_position_embeddings: int
    dtype: torch.dtype
    # A replacement that has a constructor of its own may call that of RotaryEmbeddingBase alone, with these unset.
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
        """Keep the arguments; before the constructor of the op, which computes the table."""
        expect_positive(
            "rotary_embedding", "scaling_factor", 1.0 if scaling_factor is None else scaling_factor
        )
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
        """Positions that the table reaches before they are multiplied by the factor."""
        return self.max_position_embeddings

    def _pair_that_turns(self, times: float) -> float:
        turned = math.log(self.max_position_embeddings / (times * 2.0 * math.pi))
        return self.rotary_dim * turned / (2.0 * math.log(self.base))

    def _compute_inv_freq(self, scaling_factor: float) -> Tensor:
        """Compute ``θ`` with low frequencies divided by ``scaling_factor``, ``[rotary_dim / 2]``.

        Of an op without a scaling factor it is called with the base, as that of ``RotaryEmbeddingBase``.
        """
        if self.scaling_factor is None:
            return inverse_frequencies(scaling_factor, self.rotary_dim, self.dtype)
        inv_freq = inverse_frequencies(self.base, self.rotary_dim, self.dtype)
        low, high = self._pair_that_turns(self.beta_fast), self._pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.rotary_dim - 1)
        ramp = (torch.arange(len(inv_freq), dtype=inv_freq.dtype) - low) / (high - low or 0.001)
        return _slowed(
            inv_freq, (1.0 - ramp.clamp(0.0, 1.0)) * self.extrapolation_factor, scaling_factor
        )

    def _compute_cos_sin_cache(self) -> Tensor:
        rows = math.ceil(self._trained_positions * self._factor)
        argument = self.base if self.scaling_factor is None else self.scaling_factor
        return cos_sin_table(self._compute_inv_freq(argument), rows, self.mscale)


def _yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's factor for cosines and sines, and so for attention scores by its square."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _table_scale(
    factor: float, mscale: float | None, mscale_all_dim: float | None, given: float | None
) -> float:
    """Return the factor for a table of YaRN: what is given, the ratio of two scales, or its own scale."""
    if given is not None:
        return float(given)
    if mscale and mscale_all_dim:
        return _yarn_scale(factor, mscale) / _yarn_scale(factor, mscale_all_dim)
    return _yarn_scale(factor)


class YaRNScalingRotaryEmbedding(_YaRNTable, RotaryEmbedding):
    """The rotary embedding with the frequencies of YaRN (Peng et al., arXiv:2309.00071).

    The table has ``max_position_embeddings · scaling_factor`` rows, times ``mscale``.

    Args:
        max_position_embeddings: positions that the model was first trained for.
        scaling_factor: what low frequencies are divided by.
        extrapolation_factor: how much of their frequency high ones keep.
        attn_factor: cosines and sines are multiplied by it, besides YaRN's own scale.
        beta_fast: turns from which a frequency is high.
        beta_slow: turns up to which it is low.
        apply_yarn_scaling: whether YaRN's own scale, ``0.1 · ln(scaling_factor) + 1``, is applied.
        mscale: with ``mscale_all_dim``, YaRN's own scale is ``s(mscale) / s(mscale_all_dim)`` with ``s(m) = 0.1 · m ·
            ln(scaling_factor) + 1``.
        mscale_all_dim: see ``mscale``.
        attention_factor: stands for YaRN's own scale.
        truncate: round the pairs where the transition begins and ends to whole ones.

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
        scale = (
            _table_scale(scaling_factor, mscale, mscale_all_dim, attention_factor)
            if apply_yarn_scaling
            else 1.0
        )
        self.mscale = attn_factor * scale
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)


class DeepseekScalingRotaryEmbedding(_YaRNTable, RotaryEmbeddingBase):
    """The rotary embedding of DeepSeek-V2, YaRN with two scales (arXiv:2405.04434, arXiv:2309.00071).

    The table is multiplied by ``s(mscale) / s(mscale_all_dim) · attn_factor`` with ``s(m) = 0.1 · m ·
    ln(scaling_factor) + 1``, which is kept as ``mscale``.

    Args:
        mscale: of the rotated part of a head.
        mscale_all_dim: of the whole head, which the model's softmax scale takes account of.
        init_cache: as that of ``RotaryEmbeddingBase``.

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
        self.mscale = (
            _yarn_scale(scaling_factor, mscale)
            / _yarn_scale(scaling_factor, mscale_all_dim)
            * attn_factor
        )
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
        return super().forward_native(moved(positions, offsets), query, key, functional=functional)

    functional_cuda = functional_xpu = TRITON  # makes forward_cuda, forward_xpu


def apply_interleaved_rope(x: Tensor, mrope_section: Sequence[int]) -> Tensor:
    """Put cosines, or sines, of three axes together as pairs take turns: ``[3, ..., pairs]`` becomes ``[..., pairs]``.

    Args:
        x: by time, height and width.
        mrope_section: as that of ``MRotaryEmbedding``.
    """
    pair = torch.arange(x.shape[-1], device=x.device)
    by_height = (pair % 3 == 1) & (pair < 3 * mrope_section[1])
    by_width = (pair % 3 == 2) & (pair < 3 * mrope_section[2])
    return torch.where(by_width, x[2], torch.where(by_height, x[1], x[0]))


class MRotaryEmbedding(_YaRNTable, RotaryEmbeddingBase):
    """Rotary embedding by positions in time, height and width (Qwen2-VL, arXiv:2409.12191).

    The table has ``positions_factor`` times ``max_position_embeddings`` rows, times ``scaling_factor``, because the
    positions of a video run on with its duration. With a ``scaling_factor`` the frequencies are those of YaRN, for a
    model that was trained for ``max_position_embeddings``; vLLM takes ``positions_factor`` times as many for that.

    Args:
        mrope_section: how many pairs turn by time, height and width; together ``rotary_dim / 2``. Without it the op
            takes positions as ``RotaryEmbeddingBase`` does.
        mrope_interleaved: pairs take turns, as in Qwen3-VL; otherwise the sections follow each other.
        positions_factor: how far positions run on, as a multiple of ``max_position_embeddings``.
        scaling_factor: that of YaRN; without it frequencies are plain.

    The other arguments are those of ``YaRNScalingRotaryEmbedding``.

    Raises:
        ValueError: the sections do not share out the pairs of a head, or as ``RotaryEmbeddingBase``.
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
            functional.expect_sections(mrope_section, rotary_dim, mrope_interleaved)
        self.mrope_section = mrope_section
        self.mrope_interleaved = mrope_interleaved
        self.cache_max_position_num = positions_factor * max_position_embeddings
        self._set_yarn(
            scaling_factor, extrapolation_factor, attn_factor, beta_fast, beta_slow, truncate
        )
        if scaling_factor is not None:
            self.mscale = attn_factor * _table_scale(
                scaling_factor, mscale, mscale_all_dim, attention_factor
            )
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
        """Rotate query and key, each in the shape it came in; a key of ``None`` stays ``None``.

        Args:
            positions: integers ``[3, num_tokens]`` or, of text, ``[num_tokens]``.
            query: as that of ``RotaryEmbeddingBase``.
            key: likewise.
            offsets: are added to ``positions``.

        Raises:
            ValueError: as ``RotaryEmbeddingBase``.
        """
        positions = moved(positions, offsets)
        if self.mrope_section is None or positions.dim() == 1:
            return super().forward_native(positions, query, key, functional=functional)
        sections = (self.mrope_section, self.is_neox_style, self.mrope_interleaved)
        return rotated_by(
            functional.mrope, positions, query, key, self.head_size, self.cos_sin_cache, *sections
        )

    functional_cuda = functional_xpu = TRITON  # makes forward_cuda, forward_xpu
