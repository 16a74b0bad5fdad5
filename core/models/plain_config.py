"""Configurations that are read without transformers: of common decoders, as its import takes seconds, and of others.

The others are those that transformers has no class for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from opgraft.errors import CheckpointError

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
_QWEN: Mapping[str, Any] = {
    **_LLAMA,
    "bos_token_id": None,
    "eos_token_id": None,
    "num_key_value_heads": 32,
}
_WINDOWED = ("mistral",)
"""The others' ``sliding_window`` holds for no layer without ``use_sliding_window``."""
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
}
"""By ``model_type``: what transformers takes where a checkpoint does not say it."""
_OWN: Mapping[str, Mapping[str, Any]] = {
    "plamo2": {
        "attention_window_size": 2048,
        "bos_token_id": 1,
        "dtype": None,
        "eos_token_id": 2,
        "full_attention_idx": None,
        "hidden_size": 4096,
        "hidden_size_per_head": 128,
        "intermediate_size": 13312,
        "mamba_d_conv": 4,
        "mamba_d_state": 64,
        "mamba_enabled": True,
        "mamba_num_heads": 64,
        "mamba_step": 2,
        "max_position_embeddings": 2048,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
        "pad_token_id": None,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "vocab_size": 32000,
    }
}
"""By ``model_type`` of which transformers has no class: what its published configuration takes, likewise."""
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
_UNUSUAL = (
    "auto_map",
    "layer_types",
    "partial_rotary_factor",
    "per_layer_config",
    "use_sliding_window",
)
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
    rope, dtype = (
        _rope(values),
        getattr(torch, str(values["dtype"] or values.get("torch_dtype")), None),
    )
    if (
        rope is None
        or not isinstance(dtype, torch.dtype | None)
        or not _sound(values, _DEFAULTS[kind])
    ):
        return None
    heads = values["num_attention_heads"]
    values["num_key_value_heads"] = values["num_key_value_heads"] or heads
    values["head_dim"] = values["head_dim"] or values["hidden_size"] // heads
    values["sliding_window"] = values.get("sliding_window") if kind in _WINDOWED else None
    return PlainConfig({**values, "rope_parameters": rope, "dtype": dtype})


def own_config(given: Mapping[str, Any], where: object) -> PlainConfig | None:
    """Return the configuration of an architecture that transformers has no class for and opgraft has.

    Args:
        given: by the names in ``config.json``.
        where: it is from, for errors.

    Raises:
        CheckpointError: a value is of another type than it should be.
    """
    kind = str(given.get("model_type"))
    if kind not in _OWN:
        return None
    usual = _OWN[kind]
    values = {**usual, "dtype": given.get("torch_dtype"), **given}
    for name, value in usual.items():
        kinds = (int, float) if isinstance(value, float) else (type(value),)
        if value is not None and not name.endswith("_token_id") and type(values[name]) not in kinds:
            raise CheckpointError(
                f"{where}: {name} is {values[name]!r:.80}, expected one like {value!r}"
            )
    dtype = None if values["dtype"] is None else getattr(torch, str(values["dtype"]), None)
    whole = values["full_attention_idx"] or []
    if not isinstance(whole, list) or (
        values["dtype"] is not None and not isinstance(dtype, torch.dtype)
    ):
        raise CheckpointError(
            f"{where}: full_attention_idx is {whole!r:.80} and dtype {values['dtype']!r:.80}, expected a list of "
            "layers and the name of a dtype of torch"
        )
    architectures = [f"{kind.capitalize()}ForCausalLM"]  # checkpoints have two names for one
    return PlainConfig(
        {**values, "full_attention_idx": whole, "dtype": dtype, "architectures": architectures}
    )


def _sound(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> bool:
    """Tell whether the values are there, of the right types, and fit each other."""
    sizes = all(type(values.get(name)) is int and values[name] > 0 for name in _SIZES)
    optional = all(type(values[name]) in (int, type(None)) for name in _OPTIONAL if name in values)
    same = all(
        type(values[name]) is type(usual)
        for name, usual in defaults.items()
        if isinstance(usual, bool | str)
    )
    fits = sizes and values["hidden_size"] % values["num_attention_heads"] == 0
    return fits and optional and same and type(values.get("rms_norm_eps")) is float


def _rope(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the parameters of the rope, in which older checkpoints leave out the base; ``None`` for unusual ones."""
    given = values.get("rope_scaling") or values.get("rope_parameters") or {"rope_type": "default"}
    if not isinstance(given, Mapping) or given.get("rope_type") not in _ROPES:
        return None
    rope = {"rope_theta": values.get("rope_theta", 10_000.0), **given}
    return rope if type(rope["rope_theta"]) in (int, float) else None
