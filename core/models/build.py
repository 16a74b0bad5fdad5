"""From a configuration to a model with its weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from opgraft.config import OpgraftConfig
from opgraft.errors import ModelError
from opgraft.models.config import read_config
from opgraft.models.construction import construct
from opgraft.models.description import part
from opgraft.models.files import open_weights
from opgraft.models.load import load_weights
from opgraft.models.model import Model, model_class
from opgraft.plugins.selection import current_platform
from opgraft.quantization.settings import expect_patterns_used


def load_model(opgraft_config: OpgraftConfig) -> Model:
    """Construct the model that ``opgraft_config.model`` names and load its checkpoint, a shard of both on each rank.

    Raises:
        ModelError: nothing is named, or no class is registered for the architecture.
        CheckpointError: the checkpoint is damaged, or its weights are not those of its config.
        QuantizationError: its quantization, or the one that is set, cannot be used.
    """
    resolved = opgraft_config.resolved()
    if resolved.model.name is None:
        raise ModelError("no model is named: set model.name to a checkpoint's folder or file, or to a name")
    weights = open_weights(resolved.model.name)
    config = part(read_config(weights), resolved.model.part)
    cls = model_class(getattr(config, "architectures", None) or (), resolved.model.implementation or "auto")
    device = torch.device(resolved.load.device or current_platform().device_type)
    with _defaults(dtype_of(resolved, config), device):
        model = construct(cls, opgraft_config=resolved)
    expect_patterns_used(model)
    load_weights(
        model,
        weights.tensors,
        mapper=model.weights_mapper,
        ignored=model.ignored_weights,
        progress=bool(resolved.load.progress),
    )
    return model.eval()


def dtype_of(opgraft_config: OpgraftConfig, config: Any) -> torch.dtype:
    """Return the dtype of weights and activations: the one that is set, or the checkpoint's."""
    name = opgraft_config.model.dtype
    if name not in (None, "auto"):
        return getattr(torch, str(name))  # type: ignore[no-any-return]  # one of the choices
    found = getattr(config, "dtype", None)
    return found if isinstance(found, torch.dtype) else torch.float32


@contextmanager
def _defaults(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Make tensors of that dtype on that device within the block."""
    former = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(former)
