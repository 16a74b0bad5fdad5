"""``get_rope``: the rotary embedding for the rope parameters of a model."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter, signature
from types import MappingProxyType
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

__all__ = ["get_rope"]

_TYPES: Mapping[str, Any] = MappingProxyType(
    {
        "default": RotaryEmbedding,
        "llama3": Llama3RotaryEmbedding,
        "mllama4": Llama4VisionRotaryEmbedding,
        "linear": LinearScalingRotaryEmbedding,
        "ntk": NTKScalingRotaryEmbedding,
        "dynamic": DynamicNTKScalingRotaryEmbedding,
        "yarn": YaRNScalingRotaryEmbedding,
        "deepseek_yarn": DeepseekScalingRotaryEmbedding,
        "deepseek_llama_scaling": DeepseekScalingRotaryEmbedding,
        "longrope": Phi3LongRoPEScaledRotaryEmbedding,
    }
)
"""The class of each rope type. The constructor names the parameters of a model."""

_TRAINED = "original_max_position_embeddings"
_PARAMETER_OF = MappingProxyType(
    {
        "scaling_factor": "factor",
        "scaling_factors": "factor",
        "scaling_alpha": "alpha",
        "orig_max_position": _TRAINED,
    }
)
"""A model's name of a parameter, by the name of the constructor's argument, if they differ."""


_OWN_SCALE = frozenset({"attention_factor", "truncate"})
"""Parameters of YaRN without an argument of ``DeepseekScalingRotaryEmbedding``."""


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
    """Construct the rotary embedding for the rope parameters of a model.

    Each call makes an op with a table of its own; layers may share the op. vLLM returns the same op
    for equal arguments.

    Args:
        head_size: elements of a head.
        max_position: positions of the longest context.
        is_neox_style: pair the halves of the rotated part; otherwise even elements with odd ones.
        rope_parameters: the entry of a Hugging Face config: ``rope_type``, ``rope_theta``,
            ``partial_rotary_factor`` and the parameters of the type. ``rope_dim`` is the number of
            rotated elements.
        dtype: dtype of the table; torch's default dtype by default.
        dual_chunk_attention_config: ``chunk_size`` and ``local_size`` of attention in chunks.
        mrope_positions_factor: ``positions_factor`` of ``MRotaryEmbedding``.
        model_positions: positions in the model's config, by default ``max_position``. The types
            ``dynamic`` and ``longrope`` compute their scale from this number.

    Raises:
        ValueError: ``rope_type`` is unknown, a parameter of the type is missing, or
            ``partial_rotary_factor`` is not above 0 and at most 1.
    """
    given = dict(rope_parameters or {})
    # Some configs hold a float.
    if given.get(_TRAINED):
        given[_TRAINED] = int(given[_TRAINED])
    share = given.get("partial_rotary_factor", 1.0)
    if not 0.0 < share <= 1.0:
        raise ValueError(
            f"get_rope: partial_rotary_factor is {share}, expected more than 0 and at most 1"
        )

    sizes = {
        "head_size": head_size,
        "rotary_dim": given.get("rope_dim") or int(head_size * share),
        "max_position_embeddings": max_position,
        "base": given.get("rope_theta", 10000.0),
        "is_neox_style": is_neox_style,
        "dtype": dtype or torch.get_default_dtype(),
        "positions_factor": mrope_positions_factor,
    }
    if dual_chunk_attention_config is not None:
        return _construct(DualChunkRotaryEmbedding, sizes, dual_chunk_attention_config)

    kind = given.get("rope_type", "default")
    if kind not in _TYPES:
        raise ValueError(f"get_rope: rope_type is {kind!r}: {close_matches(str(kind), _TYPES)}")

    try:
        return _rope_of_type(kind, sizes, given, model_positions or max_position)
    except KeyError as error:
        raise ValueError(
            f"get_rope: rope_type {kind!r} needs the parameter {error}, got {sorted(given)}"
        ) from error


def _rope_of_type(
    kind: str, sizes: Mapping[str, Any], given: Mapping[str, Any], model_positions: int
) -> Any:
    """Construct the op of a rope type. Some parameters select a variant of the class.

    Raises:
        KeyError: a parameter is missing.
    """
    cls = _TYPES[kind]
    if kind == "default":
        # Configs may keep parameters of another type, such as a factor.
        known = ("mrope_section", "mrope_interleaved")
        given = {name: given[name] for name in known if name in given}

    if kind == "dynamic":
        given = {"max_trained_positions": model_positions, **given}
        if "alpha" in given:
            cls = DynamicNTKAlphaRotaryEmbedding

    if kind == "longrope":
        scale = _longrope_scale(given, model_positions)
        given = {"short_mscale": scale, "long_mscale": scale, **given}
    if cls in (YaRNScalingRotaryEmbedding, DeepseekScalingRotaryEmbedding):
        sizes = {**sizes, "max_position_embeddings": given[_TRAINED]}
    has_two_scales = given.get("mscale") and given.get("mscale_all_dim")

    # Two scales make DeepSeek's variant, and plugins replace that class by itself.
    if kind == "yarn" and has_two_scales and not _OWN_SCALE & given.keys():
        cls = DeepseekScalingRotaryEmbedding
    if kind in ("default", "yarn") and "mrope_section" in given:
        cls = MRotaryEmbedding

    # MRotaryEmbedding itself has a default for the factor.
    if kind == "yarn" and "factor" not in given:
        raise KeyError("factor")
    return _construct(cls, sizes, given)


def _longrope_scale(given: Mapping[str, Any], model_positions: int) -> float:
    """Return the scale of both tables: the given factor, or LongRoPE's own."""
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    trained = given[_TRAINED]
    longer = given.get("factor") or model_positions / trained
    return longrope_scale(longer, trained)


def _construct(cls: Any, sizes: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    """Construct an op from sizes and a model's parameters, by the names of its arguments.

    Raises:
        KeyError: a parameter is missing.
    """
    positional = []
    options = {}
    _, *arguments = signature(cls.__init__).parameters.values()
    for argument in arguments:
        source = sizes
        name = argument.name
        if name not in sizes:
            source = given
            name = _PARAMETER_OF.get(name, name)
        if argument.default is Parameter.empty:
            positional.append(source[name])
        elif name in source:
            options[argument.name] = source[name]
    return cls(*positional, **options)
