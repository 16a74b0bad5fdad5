"""Tokens that do not depend on what else is in the batch, bit for bit."""

from __future__ import annotations

from opgraft.errors import MOST_LISTED, ConfigError
from opgraft.ops.attention.cached import CachedAttention
from opgraft.ops.embedding import VocabParallelEmbedding
from opgraft.ops.linear.invariant import compute_rows_alike
from opgraft.ops.linear.methods import HasWeightMethod
from opgraft.plugins.selection import current_platform
from torch import nn


def make_batch_invariant(model: nn.Module, block_size: int) -> None:
    """Have each token of a batch computed alike, whatever stands beside it and however a prompt is cut.

    Raises:
        ConfigError: some layers have no such way to compute; it lists them.
    """
    problems = [
        f"{path} ({reason})"
        for path, layer in model.named_modules()
        if (reason := _obstacle(layer, block_size))
    ]
    if problems:
        listed = "; ".join(problems[:MOST_LISTED])
        more = f" and {len(problems) - MOST_LISTED} more" if len(problems) > MOST_LISTED else ""
        raise ConfigError(
            f"model.batch_invariant is set, and layers have kernels that compute a token in other ways beside other "
            f"tokens: {listed}{more}. Turn it off, or install a plugin whose kernels do not"
            f"{_packages()}, and leave the weights float32 or bfloat16"
        )


def _packages() -> str:
    """Name packages with kernels for this platform, if there are any."""
    packages = " or ".join(current_platform().kernel_packages)
    return f", such as {packages}" if packages else ""


def _obstacle(layer: nn.Module, block_size: int) -> str | None:
    if isinstance(layer, CachedAttention):
        return None if layer.batch_invariant(block_size) else f"attention by {type(layer).__name__}"
    if isinstance(layer, VocabParallelEmbedding) and layer.looks_up:
        return None
    if isinstance(layer, HasWeightMethod):
        return compute_rows_alike(layer)
    matrices = [
        name for name, parameter in layer.named_parameters(recurse=False) if parameter.dim() > 1
    ]
    return f"{type(layer).__name__} with its own {', '.join(matrices)}" if matrices else None
