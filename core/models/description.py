"""The description of the model to construct: the architecture's config, and the quantization."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opgraft.config import OpgraftConfig
from opgraft.errors import CheckpointError, ModelError, close_matches
from opgraft.models.config import check_config, folder_of, read_config
from opgraft.models.extras import import_extra
from opgraft.models.files import Weights, open_weights, read_json
from opgraft.models.names import WeightsMapper
from opgraft.ops.linear.quantization_config import QuantizationConfig
from opgraft.quantization import quantizations
from opgraft.quantization.settings import choose_quantization

WEIGHT_SCALES = (".weight_scale", ".weight_scale_inv")
"""Ends of the names of tensors that scale a weight."""


def architecture_config(opgraft_config: OpgraftConfig, *, plain: bool = False) -> Any:
    """Read the config of the architecture from the checkpoint.

    Args:
        opgraft_config: names the checkpoint and, if the model is a part, the part of the config.
        plain: see ``read_config``. A part always has a class of transformers.

    Raises:
        ModelError: no checkpoint is named, or the config has no such part.
        CheckpointError: the checkpoint cannot be read.
    """
    model = opgraft_config.model
    if model.name is None:
        raise ModelError(
            "a model is constructed and model.name, which checkpoint has its config, is not set"
        )
    config = read_config(open_weights(model.name), plain=plain and model.part is None)
    return part(config, model.part)


def part(config: Any, name: str | None) -> Any:
    """Return the part of a config with a name, such as ``"text_config"``; the whole for ``None``.

    Raises:
        ModelError: the config has no such part.
    """
    if name is None:
        return config
    found = getattr(config, name, None)
    kind = import_extra("transformers").PreTrainedConfig
    if not isinstance(found, kind):
        parts = [known for known, value in vars(config).items() if isinstance(value, kind)]
        raise ModelError(
            f"{type(config).__name__} has no part {name!r}: {close_matches(name, parts)}"
        )
    return found


def part_of(opgraft_config: OpgraftConfig, name: str) -> OpgraftConfig:
    """Return the configuration to construct a part of the model with.

    Example: ``LlamaModel(opgraft_config=part_of(opgraft_config, "text_config"))``.
    """
    model = dataclasses.replace(opgraft_config.model, part=name)
    return dataclasses.replace(opgraft_config, model=model)


def quantization_config(opgraft_config: OpgraftConfig, model: Any) -> QuantizationConfig | None:
    """Return the quantization of a model's layers; ``None`` if all layers are plain.

    The settings may ask to quantize weights on loading. The config of a checkpoint with quantized
    weights describes the quantization.

    Args:
        opgraft_config: names the checkpoint, and has the settings.
        model: has the tables ``packed_modules_mapping`` and ``weights_mapper``.

    Raises:
        QuantizationError: a named quantization is not known, or the settings contradict the
            checkpoint.
        CheckpointError: the checkpoint cannot be read.
    """
    resolved = opgraft_config.resolved()
    settings = resolved.quantization
    merged = model.packed_modules_mapping
    if resolved.model.name is None:
        return choose_quantization(settings, {}, merged)
    weights = open_weights(resolved.model.name)
    own = checkpoint_quantization(weights)
    # The settings of some checkpoints call a layer quantized that is stored plain.
    stored = stored_layers(weights, model.weights_mapper) if own else {}
    return choose_quantization(settings, own, merged, stored)


def stored_layers(weights: Weights, mapper: WeightsMapper) -> dict[str, bool]:
    """Return name of a layer of the checkpoint → True if the weight is quantized.

    A plain layer has a ``weight`` of 16 bits or more in floating point. A quantized layer has
    integers, floating point of 8 bits, or a scale of its ``weight``. Layers with neither, such as
    a bias alone, are left out.
    """
    stored: dict[str, bool] = {}
    for name, tensor in weights.tensors.items():
        is_wide = tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1
        # A plain weight has no scale: loading names the dtype of a wide weight with a scale.
        is_quantized = not is_wide or name.endswith(WEIGHT_SCALES)
        if not is_quantized and not name.endswith(".weight"):
            continue
        for spelled in mapper.spellings(name):
            layer = spelled.rpartition(".")[0]
            # One quantized tensor of several is enough: plain ones may stand beside it.
            stored[layer] = stored.get(layer, False) or is_quantized
    return stored


def checkpoint_quantization(weights: Weights) -> Mapping[str, Any]:
    """Return the quantization settings of a checkpoint, with a ``quant_method``; empty if plain.

    For a GGUF file, ``types`` has the type of blocks by the name of each quantized tensor. Other
    checkpoints have the settings in ``config.json``, or in a file that the class of the
    quantization names.

    Raises:
        CheckpointError: the checkpoint cannot be read, or the settings name no ``quant_method``.
    """
    if weights.is_gguf:
        types = {}
        for name, tensor in weights.tensors.items():
            if tensor.quantization:
                types[name] = tensor.quantization
        return {"quant_method": "gguf", "types": types}
    file = folder_of(weights) / "config.json"
    values = check_config(file)
    # Older versions of compressed-tensors wrote the second name.
    found = (
        values.get("quantization_config")
        or values.get("compression_config")
        or _settings_in_own_file(file.parent)
    )
    # A checkpoint without quantization may have an empty object.
    if isinstance(found, dict) and not found:
        return found
    if not isinstance(found, dict) or not isinstance(found.get("quant_method"), str):
        raise CheckpointError(
            f"{file}: quantization_config is {found!r:.200}, expected settings with a "
            "quant_method, such as 'gptq'"
        )
    return found


def _settings_in_own_file(folder: Path) -> dict[str, Any]:
    """Return the settings in a quantization's own file beside the weights; empty without a file."""
    for name, cls in quantizations().items():
        for filename in cls.get_config_filenames():
            file = folder / filename
            if file.is_file():
                return {"quant_method": name, **read_json(file)}
    return {}


def joined(prefix: str, name: str) -> str:
    """Return the path of a child. The prefix of the whole model is empty."""
    return f"{prefix}.{name}" if prefix else name
