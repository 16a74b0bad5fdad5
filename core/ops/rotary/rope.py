"""From a model's rope parameters to its rotary embedding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from opgraft.errors import close_matches
from opgraft.ops.rotary.dual_chunk import DualChunkRotaryEmbedding
from opgraft.ops.rotary.modules import RotaryEmbedding
from opgraft.ops.rotary.scaled import (
    DynamicNTKAlphaRotaryEmbedding,
    DynamicNTKScalingRotaryEmbedding,
    LinearScalingRotaryEmbedding,
    NTKScalingRotaryEmbedding,
    Phi3LongRoPEScaledRotaryEmbedding,
    longrope_scale,
)
from opgraft.ops.rotary.variants import (
    DeepseekScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    MRotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)
from opgraft.ops.rotary.vision import Llama4VisionRotaryEmbedding

_YARN = (
    "extrapolation_factor",
    "attn_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)
_OWN_SCALE = {"attention_factor", "truncate"}
"""Parameters that ``DeepseekScalingRotaryEmbedding`` does not take."""

_YARN_SCALE = (*_YARN, *sorted(_OWN_SCALE))


@dataclass(frozen=True)
class _Rope:
    """The settings of a model for its rope, with the arguments that all rotary embeddings take."""

    head_size: int
    rotary_dim: int
    max_position: int
    base: float
    is_neox_style: bool
    dtype: torch.dtype
    given: Mapping[str, Any]
    positions_factor: int
    model_positions: int

    def sizes(self, positions: int | None = None) -> tuple[int, int, int, float, bool]:
        """Return the arguments that come before the dtype, for the longest context or for other positions."""
        return (
            self.head_size,
            self.rotary_dim,
            positions or self.max_position,
            self.base,
            self.is_neox_style,
        )

    @property
    def trained(self) -> int:
        """The positions that the model was first trained for, which it must tell."""
        return int(self.given["original_max_position_embeddings"])

    def options(self, *names: str) -> dict[str, Any]:
        """Return those of the named parameters that the model gives."""
        return {name: self.given[name] for name in names if name in self.given}


def get_rope(
    head_size: int,
    max_position: int,
    is_neox_style: bool = True,
    rope_parameters: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    dual_chunk_attention_config: Mapping[str, Any] | None = None,
    mrope_positions_factor: int = 4,
    *,
    model_positions: int | None = None,
) -> Any:
    """Construct the rotary embedding that a model's rope parameters ask for.

    Each call makes an op with a table of its own, which layers may share. vLLM returns the same op for equal arguments.

    Args:
        head_size: elements of a head.
        max_position: positions of the longest context.
        is_neox_style: pair the halves of the rotated part; otherwise even elements with odd ones.
        rope_parameters: those of a Hugging Face config: ``rope_type``, ``rope_theta``, ``partial_rotary_factor`` and
            what the type needs. ``rope_dim`` is the rotated part in elements.
        dtype: dtype of the table; torch's default dtype if not given.
        dual_chunk_attention_config: ``chunk_size`` and ``local_size`` of attention in chunks.
        mrope_positions_factor: ``positions_factor`` of ``MRotaryEmbedding``.
        model_positions: positions that the model's config is for, from which the types ``dynamic`` and ``longrope``
            compute their scale; ``max_position`` if not given.

    Raises:
        ValueError: an unknown ``rope_type``, one whose parameters are missing, or ``partial_rotary_factor`` is not
            above 0 and at most 1.
    """
    given = rope_parameters or {}
    share = given.get("partial_rotary_factor", 1.0)
    if not 0.0 < share <= 1.0:
        raise ValueError(
            f"get_rope: partial_rotary_factor is {share}, expected more than 0 and at most 1"
        )
    rotary_dim = given.get("rope_dim") or int(head_size * share)
    base = given.get("rope_theta", 10000.0)
    dtype = dtype or torch.get_default_dtype()
    factors = (mrope_positions_factor, model_positions or max_position)
    rope = _Rope(head_size, rotary_dim, max_position, base, is_neox_style, dtype, given, *factors)
    if dual_chunk_attention_config is not None:
        chunk_size, local_size = (
            dual_chunk_attention_config[name] for name in ("chunk_size", "local_size")
        )
        return DualChunkRotaryEmbedding(*rope.sizes(), dtype, chunk_size, local_size)
    kind = given.get("rope_type", "default")
    if kind not in _TYPES:
        raise ValueError(f"get_rope: rope_type is {kind!r}: {close_matches(str(kind), _TYPES)}")
    try:
        return _TYPES[kind](rope)
    except KeyError as error:
        raise ValueError(
            f"get_rope: rope_type {kind!r} needs the parameter {error}, got {sorted(given)}"
        ) from error


def _default(rope: _Rope) -> Any:
    if "mrope_section" not in rope.given:
        return RotaryEmbedding(*rope.sizes(), rope.dtype)
    return MRotaryEmbedding(*rope.sizes(), rope.dtype, **_sections(rope))


def _sections(rope: _Rope) -> dict[str, Any]:
    return {
        **rope.options("mrope_section", "mrope_interleaved"),
        "positions_factor": rope.positions_factor,
    }


def _llama3(rope: _Rope) -> Any:
    factor, low, high = (
        rope.given[name] for name in ("factor", "low_freq_factor", "high_freq_factor")
    )
    return Llama3RotaryEmbedding(*rope.sizes(), rope.dtype, factor, low, high, rope.trained)


def _llama4_vision(rope: _Rope) -> Any:
    return Llama4VisionRotaryEmbedding(*rope.sizes(), rope.dtype)


def _linear(rope: _Rope) -> Any:
    return LinearScalingRotaryEmbedding(*rope.sizes(), rope.given["factor"], rope.dtype)


def _ntk(rope: _Rope) -> Any:
    return NTKScalingRotaryEmbedding(
        *rope.sizes(), rope.given["factor"], rope.dtype, rope.given.get("mixed_b")
    )


def _dynamic(rope: _Rope) -> Any:
    if "alpha" in rope.given:
        return DynamicNTKAlphaRotaryEmbedding(*rope.sizes(), rope.given["alpha"], rope.dtype)
    head_size, rotary_dim, positions, base, is_neox_style = rope.sizes()
    trained = rope.given.get("max_trained_positions", rope.model_positions)
    return DynamicNTKScalingRotaryEmbedding(
        head_size,
        rotary_dim,
        positions,
        trained,
        base,
        is_neox_style,
        rope.given["factor"],
        rope.dtype,
    )


def _yarn(rope: _Rope) -> Any:
    factor, options = rope.given["factor"], rope.options(*_YARN_SCALE)
    if "mrope_section" in rope.given:
        options |= {**_sections(rope), "scaling_factor": factor}
        return MRotaryEmbedding(*rope.sizes(rope.trained), rope.dtype, **options)
    # Two scales are DeepSeek's variant, which replacements know by a class of its own.
    if options.get("mscale") and options.get("mscale_all_dim") and not _OWN_SCALE & options.keys():
        return _deepseek(rope)
    options |= rope.options("apply_yarn_scaling")
    return YaRNScalingRotaryEmbedding(*rope.sizes(rope.trained), factor, rope.dtype, **options)


def _deepseek(rope: _Rope) -> Any:
    return DeepseekScalingRotaryEmbedding(
        *rope.sizes(rope.trained), rope.given["factor"], rope.dtype, **rope.options(*_YARN)
    )


def _longrope(rope: _Rope) -> Any:
    head_size, rotary_dim, positions, base, is_neox_style = rope.sizes()
    scale = rope.given.get("attention_factor")
    if scale is None:
        scale = longrope_scale(
            rope.given.get("factor") or rope.model_positions / rope.trained, rope.trained
        )
    scales = {
        "short_mscale": scale,
        "long_mscale": scale,
        **rope.options("short_mscale", "long_mscale"),
    }
    return Phi3LongRoPEScaledRotaryEmbedding(
        head_size,
        rotary_dim,
        positions,
        rope.trained,
        base,
        is_neox_style,
        rope.dtype,
        rope.given["short_factor"],
        rope.given["long_factor"],
        **scales,
    )


_TYPES: Mapping[str, Callable[[_Rope], Any]] = {
    "default": _default,
    "llama3": _llama3,
    "mllama4": _llama4_vision,
    "linear": _linear,
    "ntk": _ntk,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "deepseek_yarn": _deepseek,
    "deepseek_llama_scaling": _deepseek,
    "longrope": _longrope,
}
