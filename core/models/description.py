"""The description of the model that is constructed: its architecture's config, and its quantization."""

from __future__ import annotations

import dataclasses
from typing import Any

from opgraft.config import OpgraftConfig
from opgraft.errors import ModelError, close_matches
from opgraft.models.config import read_config
from opgraft.models.files import open_weights
from opgraft.ops.linear.quantization_config import QuantizationConfig


def architecture_config(opgraft_config: OpgraftConfig) -> Any:
    """Read the config of the architecture from the checkpoint, of transformers' class for it.

    Raises:
        ModelError: no checkpoint is named, or its config has no such part.
        CheckpointError: the checkpoint cannot be read.
    """
    model = opgraft_config.model
    if model.name is None:
        raise ModelError("a model is constructed and model.name, which checkpoint has its config, is not set")
    config = read_config(open_weights(model.name))
    if model.part is None:
        return config
    part = getattr(config, model.part, None)
    if not hasattr(part, "to_dict"):
        parts = [name for name, value in vars(config).items() if hasattr(value, "to_dict")]
        raise ModelError(f"the config of {model.name} has no part {model.part!r}: {close_matches(model.part, parts)}")
    return part


def part_of(opgraft_config: OpgraftConfig, part: str) -> OpgraftConfig:
    """Return the configuration of a part of the model, such as ``"text_config"``, to construct it with."""
    return dataclasses.replace(opgraft_config, model=dataclasses.replace(opgraft_config.model, part=part))


def quantization_config(opgraft_config: OpgraftConfig, model: Any) -> QuantizationConfig | None:
    """Return what chooses the weight methods of a model's layers; ``None`` where all are plain."""
    return None


def joined(prefix: str, name: str) -> str:
    """Return the path of a child, whose parent may be the whole model."""
    return f"{prefix}.{name}" if prefix else name
