"""Configurations of the common decoders, read without transformers, whose own classes take seconds to import."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_LLAMA: Mapping[str, Any] = {
    "architectures": None,
    "attention_bias": False,
    "bos_token_id": 1,
    "dtype": None,
    "eos_token_id": 2,
    "head_dim": None,
    "hidden_act": "silu",
    "mlp_bias": False,
    "num_key_value_heads": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_QWEN: Mapping[str, Any] = {**_LLAMA, "bos_token_id": None, "eos_token_id": None, "num_key_value_heads": 32}
_WINDOWED = ("mistral",)
"""The others' ``sliding_window`` holds for no layer without ``use_sliding_window``."""
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
}
"""By ``model_type``: what transformers takes where a checkpoint does not say it."""
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_OPTIONAL = ("head_dim", "num_key_value_heads", "sliding_window")
_ROPES = ("default", "linear", "llama3")
_UNUSUAL = ("auto_map", "layer_types", "partial_rotary_factor", "per_layer_config", "use_sliding_window")
"""Settings that transformers makes others of."""


class PlainConfig:
    """The configuration of a decoder, with the attributes of transformers' class that the written decoders read.

    Args:
        values: by the names in ``config.json``.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        vars(self).update(values)

    def get_text_config(self) -> PlainConfig:
        """Return itself: it is that of a decoder of text."""
        return self


def plain_config(given: Mapping[str, Any]) -> PlainConfig | None:
    """Return the configuration that settings describe, if each is one of the usual ones.

    Args:
        given: by the names in ``config.json``.

    Returns:
        The configuration; ``None`` where transformers is to read it, or to say what is wrong with it.
    """
    kind = str(given.get("model_type"))
    if kind not in _DEFAULTS or any(given.get(name) for name in _UNUSUAL):
        return None
    values = {**_DEFAULTS[kind], **given}
    rope, dtype = _rope(values), getattr(torch, str(values["dtype"] or values.get("torch_dtype")), None)
    if rope is None or not isinstance(dtype, torch.dtype | None) or not _sound(values, _DEFAULTS[kind]):
        return None
    heads = values["num_attention_heads"]
    values["num_key_value_heads"] = values["num_key_value_heads"] or heads
    values["head_dim"] = values["head_dim"] or values["hidden_size"] // heads
    values["sliding_window"] = values.get("sliding_window") if kind in _WINDOWED else None
    return PlainConfig({**values, "rope_parameters": rope, "dtype": dtype})


def _sound(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> bool:
    """Tell whether the values are there, of the right types, and fit each other."""
    sizes = all(type(values.get(name)) is int and values[name] > 0 for name in _SIZES)
    optional = all(type(values[name]) in (int, type(None)) for name in _OPTIONAL if name in values)
    same = all(type(values[name]) is type(usual) for name, usual in defaults.items() if isinstance(usual, bool | str))
    fits = sizes and values["hidden_size"] % values["num_attention_heads"] == 0
    return fits and optional and same and type(values.get("rms_norm_eps")) is float


def _rope(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the parameters of the rope, in which older checkpoints leave out the base; ``None`` for unusual ones."""
    given = values.get("rope_scaling") or values.get("rope_parameters") or {"rope_type": "default"}
    if not isinstance(given, Mapping) or given.get("rope_type") not in _ROPES:
        return None
    rope = {"rope_theta": values.get("rope_theta", 10_000.0), **given}
    return rope if type(rope["rope_theta"]) in (int, float) else None
