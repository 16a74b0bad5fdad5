"""From a model's rope parameters to its rotary embedding."""

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
"""The class for each rope type; its constructor names the parameters that a model gives."""

_TRAINED = "original_max_position_embeddings"
_PARAMETER_OF = MappingProxyType(
    {
        "scaling_factor": "factor",
        "scaling_factors": "factor",
        "scaling_alpha": "alpha",
        "orig_max_position": _TRAINED,
    }
)
"""Parameters of models whose arguments of constructors have other names, by argument."""

_OWN_SCALE = frozenset({"attention_factor", "truncate"})
"""Parameters that ``DeepseekScalingRotaryEmbedding`` does not take."""


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

    Each call makes an op with a table of its own, which layers may share. vLLM returns the same op
    for equal arguments.

    Args:
        head_size: elements of a head.
        max_position: positions of the longest context.
        is_neox_style: pair the halves of the rotated part; otherwise even elements with odd ones.
        rope_parameters: those of a Hugging Face config: ``rope_type``, ``rope_theta``,
            ``partial_rotary_factor`` and the parameters of the type. ``rope_dim`` is the rotated part
            in elements.
        dtype: dtype of the table; torch's default dtype if not given.
        dual_chunk_attention_config: ``chunk_size`` and ``local_size`` of attention in chunks.
        mrope_positions_factor: ``positions_factor`` of ``MRotaryEmbedding``.
        model_positions: positions that the model's config is for. The types ``dynamic`` and
            ``longrope`` compute their scale from them; ``max_position`` if not given.

    Raises:
        ValueError: an unknown ``rope_type``, one whose parameters are missing, or
            ``partial_rotary_factor`` is not above 0 and at most 1.
    """
    given = dict(rope_parameters or {})
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
        return _of_type(kind, sizes, given, model_positions or max_position)
    except KeyError as error:
        raise ValueError(
            f"get_rope: rope_type {kind!r} needs the parameter {error}, got {sorted(given)}"
        ) from error


def _of_type(
    kind: str, sizes: Mapping[str, Any], given: Mapping[str, Any], model_positions: int
) -> Any:
    """Construct the op of a rope type. Some parameters ask for a variant of the table's class."""
    cls = _TYPES[kind]
    if kind == "default":
        # Configs may keep parameters of another type, such as a factor.
        given = {
            name: given[name] for name in ("mrope_section", "mrope_interleaved") if name in given
        }
    if kind == "dynamic":
        given = {"max_trained_positions": model_positions, **given}
        cls = DynamicNTKAlphaRotaryEmbedding if "alpha" in given else cls
    if kind == "longrope":
        scale = _longrope_scale(given, model_positions)
        given = {"short_mscale": scale, "long_mscale": scale, **given}
    if cls in (YaRNScalingRotaryEmbedding, DeepseekScalingRotaryEmbedding):
        sizes = {**sizes, "max_position_embeddings": given[_TRAINED]}
    if kind == "yarn" and given.get("mscale") and given.get("mscale_all_dim"):
        # Two scales are DeepSeek's variant, which replacements know by a class of its own.
        cls = cls if _OWN_SCALE & given.keys() else DeepseekScalingRotaryEmbedding
    if kind in ("default", "yarn") and "mrope_section" in given:
        cls = MRotaryEmbedding
    if kind == "yarn" and "factor" not in given:  # which MRotaryEmbedding does without
        raise KeyError("factor")
    return _construct(cls, sizes, given)


def _longrope_scale(given: Mapping[str, Any], model_positions: int) -> float:
    """Return the scale of both tables, unless the model gives one for each."""
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    trained = given[_TRAINED]
    return longrope_scale(given.get("factor") or model_positions / trained, trained)


def _construct(cls: Any, sizes: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    """Construct an op from sizes and a model's parameters, by the names of its arguments.

    Raises:
        KeyError: a parameter is missing.
    """
    positional, options = [], {}
    _, *arguments = signature(cls.__init__).parameters.values()
    for argument in arguments:
        parameter = _PARAMETER_OF.get(argument.name, argument.name)
        source, name = (sizes, argument.name) if argument.name in sizes else (given, parameter)
        if argument.default is Parameter.empty:
            positional.append(source[name])
        elif name in source:
            options[argument.name] = source[name]
    return cls(*positional, **options)
