"""The description of the model that is constructed: its architecture's config, and its quantization."""

from __future__ import annotations

from typing import Any

from opgraft.config import OpgraftConfig
from opgraft.errors import ModelError
from opgraft.ops.linear.quantization_config import QuantizationConfig


def architecture_config(opgraft_config: OpgraftConfig) -> Any:
    """Return the config of the architecture, of transformers' class for it.

    Raises:
        ModelError: the configuration has none.
    """
    config = opgraft_config.model.hf_config
    if config is None:
        raise ModelError(
            "a model is constructed without its architecture's config: set model.hf_config, or load one with "
            "opgraft.models.load_model, which reads it from the checkpoint"
        )
    return config


def quantization_config(opgraft_config: OpgraftConfig, model: Any) -> QuantizationConfig | None:
    """Return what chooses the weight methods of a model's layers; ``None`` where all are plain."""
    return None


def joined(prefix: str, name: str) -> str:
    """Return the path of a child, whose parent may be the whole model."""
    return f"{prefix}.{name}" if prefix else name
