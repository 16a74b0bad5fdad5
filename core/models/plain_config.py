"""Configurations that opgraft reads without transformers.

These are the configurations of common decoders, as the import of transformers takes seconds, and
of architectures without a class in transformers.
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
"""Types with a window in all layers. Other types need ``use_sliding_window`` beside the window."""

_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
}
"""By ``model_type``: the values of transformers for settings that a checkpoint leaves out."""

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
"""The same for types without a class in transformers: the values of the published code."""

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
"""Settings that transformers derives other settings from."""


class PlainConfig:
    """The configuration of a decoder, with the attributes that opgraft's decoders read.

    Args:
        values: the settings by their names in ``config.json``.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        vars(self).update(values)

    def get_text_config(self) -> PlainConfig:
        """Return this object, as the whole model is a decoder of text."""
        return self


def plain_config(given: Mapping[str, Any]) -> PlainConfig | None:
    """Return the configuration of a common decoder, if all settings are usual and sound.

    Args:
        given: the settings by their names in ``config.json``.

    Returns:
        The configuration; ``None`` if transformers has to read the settings, or to name a fault.
    """
    kind = str(given.get("model_type"))
    # Whatever is not plainly right is left to transformers, with its messages.
    if kind not in _DEFAULTS or any(given.get(name) for name in _UNUSUAL):
        return None
    values = {**_DEFAULTS[kind], **given}
    rope = _rope_parameters(values)
    # Newer versions of transformers write "dtype", older ones "torch_dtype".
    dtype = getattr(torch, str(values["dtype"] or values.get("torch_dtype")), None)
    # A name such as "float32" gives a dtype, and another one may give any object of torch.
    if rope is None or not isinstance(dtype, torch.dtype | None):
        return None
    if not _are_sound(values, _DEFAULTS[kind]):
        return None
    heads = values["num_attention_heads"]
    values["num_key_value_heads"] = values["num_key_value_heads"] or heads
    values["head_dim"] = values["head_dim"] or values["hidden_size"] // heads
    values["sliding_window"] = values.get("sliding_window") if kind in _WINDOWED else None
    return PlainConfig({**values, "rope_parameters": rope, "dtype": dtype})


def own_config(given: Mapping[str, Any], where: object) -> PlainConfig | None:
    """Return the configuration of an architecture without a class in transformers.

    Args:
        given: the settings by their names in ``config.json``.
        where: the file, for errors.

    Returns:
        The configuration; ``None`` for other architectures.

    Raises:
        CheckpointError: a value has a wrong type.
    """
    kind = str(given.get("model_type"))
    if kind not in _OWN:
        return None
    values = {**_OWN[kind], "dtype": given.get("torch_dtype"), **given}
    _expect_types(values, _OWN[kind], where)
    dtype = None
    if values["dtype"] is not None:
        dtype = getattr(torch, str(values["dtype"]), None)
    has_dtype = values["dtype"] is None or isinstance(dtype, torch.dtype)
    whole = values["full_attention_idx"] or []
    if not isinstance(whole, list) or not has_dtype:
        raise CheckpointError(
            f"{where}: full_attention_idx is {whole!r:.80} and dtype {values['dtype']!r:.80}, "
            "expected a list of layers and the name of a dtype of torch"
        )
    # Checkpoints have two names for this architecture.
    architectures = [f"{kind.capitalize()}ForCausalLM"]
    return PlainConfig(
        {**values, "full_attention_idx": whole, "dtype": dtype, "architectures": architectures}
    )


def _expect_types(
    values: Mapping[str, Any], usual_values: Mapping[str, Any], where: object
) -> None:
    """Refuse values of other types than the usual values.

    Raises:
        CheckpointError: a value has another type.
    """
    for name, usual in usual_values.items():
        # Ids of tokens may be lists, and None tells no type.
        if usual is None or name.endswith("_token_id"):
            continue
        types = (int, float) if isinstance(usual, float) else (type(usual),)
        if type(values[name]) not in types:
            raise CheckpointError(
                f"{where}: {name} is {values[name]!r:.80}, expected one like {usual!r}"
            )


def _are_sound(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> bool:
    """Return True if no value is missing, the types are right, and the values fit each other."""
    for name in _SIZES:
        if type(values.get(name)) is not int or values[name] <= 0:
            return False
    for name in _OPTIONAL:
        if name in values and type(values[name]) not in (int, type(None)):
            return False
    for name, usual in defaults.items():
        if isinstance(usual, bool | str) and type(values[name]) is not type(usual):
            return False
    if values["hidden_size"] % values["num_attention_heads"]:
        return False
    return type(values.get("rms_norm_eps")) is float


def _rope_parameters(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the parameters of the rope; ``None`` for an unusual rope."""
    given = values.get("rope_scaling") or values.get("rope_parameters") or {"rope_type": "default"}
    if not isinstance(given, Mapping) or given.get("rope_type") not in _ROPES:
        return None
    # Older checkpoints have the base beside the parameters.
    rope = {"rope_theta": values.get("rope_theta", 10_000.0), **given}
    return rope if type(rope["rope_theta"]) in (int, float) else None
