"""The description of the model that is constructed: its architecture's config, and its quantization."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opgraft.config import OpgraftConfig
from opgraft.errors import CheckpointError, ModelError, close_matches
from opgraft.models.config import check_config, read_config
from opgraft.models.extras import import_extra
from opgraft.models.files import Weights, open_weights, read_json
from opgraft.models.names import WeightsMapper
from opgraft.ops.linear.quantization_config import QuantizationConfig
from opgraft.quantization import quantizations
from opgraft.quantization.settings import choose_quantization

WEIGHT_SCALES = (".weight_scale", ".weight_scale_inv")  # ends of names of tensors


def architecture_config(opgraft_config: OpgraftConfig, *, plain: bool = False) -> Any:
    """Read the config of the architecture from the checkpoint, of transformers' class for it.

    Args:
        opgraft_config: names the checkpoint, and the part of its config.
        plain: see ``read_config``; a part is always of transformers' class.

    Raises:
        ModelError: no checkpoint is named, or its config has no such part.
        CheckpointError: the checkpoint cannot be read.
    """
    model = opgraft_config.model
    if model.name is None:
        raise ModelError(
            "a model is constructed and model.name, which checkpoint has its config, is not set"
        )
    return part(
        read_config(open_weights(model.name), plain=plain and model.part is None), model.part
    )


def part(config: Any, name: str | None) -> Any:
    """Return the part of a config that has that name, or the whole for ``None``.

    Raises:
        ModelError: it has no such part.
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
    """Return the configuration of a part of the model, such as ``"text_config"``, to construct it with."""
    return dataclasses.replace(
        opgraft_config, model=dataclasses.replace(opgraft_config.model, part=name)
    )


def quantization_config(opgraft_config: OpgraftConfig, model: Any) -> QuantizationConfig | None:
    """Return what chooses the weight methods of a model's layers; ``None`` if all are plain.

    Settings say what is quantized while it is loaded; a checkpoint that is quantized already says so in its config.

    Args:
        opgraft_config: names the checkpoint, and has the settings.
        model: has the tables ``packed_modules_mapping`` and ``weights_mapper``.

    Raises:
        QuantizationError: there is no quantization of a name, or the settings contradict the checkpoint.
        CheckpointError: the checkpoint cannot be read.
    """
    resolved = opgraft_config.resolved()
    settings, merged = resolved.quantization, model.packed_modules_mapping
    if resolved.model.name is None:
        return choose_quantization(settings, {}, merged)
    weights = open_weights(resolved.model.name)
    own = checkpoint_quantization(weights)
    stored = stored_layers(weights, model.weights_mapper) if own else {}
    return choose_quantization(settings, own, merged, stored)


def stored_layers(weights: Weights, mapper: WeightsMapper) -> dict[str, bool]:
    """Return name of a layer of the checkpoint → whether its weight is quantized.

    A plain layer has a ``weight`` of 16 bits or more in floating point. A quantized one has
    integers, floating point of 8 bits, or a scale of its ``weight``. One that has none of these,
    such as a bias alone, is left out.
    """
    stored: dict[str, bool] = {}
    for name, tensor in weights.tensors.items():
        wide = tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1
        # A plain weight has no scale: loading names the dtype of a wide weight that has one.
        quantized = not wide or name.endswith(WEIGHT_SCALES)
        if not quantized and not name.endswith(".weight"):
            continue
        for spelled in mapper.spellings(name):
            layer = spelled.rpartition(".")[0]
            stored[layer] = stored.get(layer, False) or quantized
    return stored


def checkpoint_quantization(weights: Weights) -> Mapping[str, Any]:
    """Return what a checkpoint says of its quantization, with its name as ``quant_method``; empty for a plain one.

    Of a GGUF file it is ``types``, the type of blocks by the name of each tensor that has any. Of others it stands in
    ``config.json``, or in a file of its own, of which the quantization knows the name.

    Raises:
        CheckpointError: the checkpoint cannot be read, or says it in no way that is known.
    """
    if weights.is_gguf:
        types = {
            name: tensor.quantization
            for name, tensor in weights.tensors.items()
            if tensor.quantization
        }
        return {"quant_method": "gguf", "types": types}
    file = (weights.path if weights.path.is_dir() else weights.path.parent) / "config.json"
    values = check_config(file)
    found = (
        values.get("quantization_config")
        or values.get("compression_config")
        or _beside(file.parent)
    )
    if not isinstance(found, dict) or (found and not isinstance(found.get("quant_method"), str)):
        raise CheckpointError(
            f"{file}: quantization_config is {found!r:.200}, expected settings with a quant_method, such as 'gptq'"
        )
    return found


def _beside(folder: Path) -> dict[str, Any]:
    """Return the settings in a file that a quantization has beside the weights; none where there is no such file."""
    for name, cls in quantizations().items():
        for file in map(folder.joinpath, cls.get_config_filenames()):
            if file.is_file():
                return {"quant_method": name, **read_json(file)}
    return {}


def joined(prefix: str, name: str) -> str:
    """Return the path of a child, whose parent may be the whole model."""
    return f"{prefix}.{name}" if prefix else name
