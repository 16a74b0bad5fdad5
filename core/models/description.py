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
    return part(read_config(open_weights(model.name)), model.part)


def part(config: Any, name: str | None) -> Any:
    """Return the part of a config that has that name, or the whole for ``None``.

    Raises:
        ModelError: it has no such part.
    """
    if name is None:
        return config
    found = getattr(config, name, None)
    if not hasattr(found, "to_dict"):
        parts = [known for known, value in vars(config).items() if hasattr(value, "to_dict")]
        raise ModelError(f"{type(config).__name__} has no part {name!r}: {close_matches(name, parts)}")
    return found


def part_of(opgraft_config: OpgraftConfig, name: str) -> OpgraftConfig:
    """Return the configuration of a part of the model, such as ``"text_config"``, to construct it with."""
    return dataclasses.replace(opgraft_config, model=dataclasses.replace(opgraft_config.model, part=name))


def quantization_config(opgraft_config: OpgraftConfig, model: Any) -> QuantizationConfig | None:
    """Return what chooses the weight methods of a model's layers; ``None`` where all are plain."""
    return None


def joined(prefix: str, name: str) -> str:
    """Return the path of a child, whose parent may be the whole model."""
    return f"{prefix}.{name}" if prefix else name
