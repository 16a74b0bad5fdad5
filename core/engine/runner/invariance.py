"""Tokens independent of the rest of the batch, bit for bit."""

from __future__ import annotations

from opgraft.errors import MOST_LISTED, ConfigError
from opgraft.ops.attention.cached import CachedAttention
from opgraft.ops.embedding import VocabParallelEmbedding
from opgraft.ops.linear.invariant import compute_rows_alike
from opgraft.ops.linear.methods import HasWeightMethod
from opgraft.plugins.selection import current_platform
from torch import nn


def make_batch_invariant(model: nn.Module, block_size: int) -> None:
    """Make layers compute each token alike, with any neighbours and any chunks of a prompt.

    Raises:
        ConfigError: some layers cannot; the message lists them.
    """
    problems = []
    for path, layer in model.named_modules():
        reason = _why_not_alike(layer, block_size)
        if reason:
            problems.append(f"{path} ({reason})")
    if not problems:
        return
    listed = "; ".join(problems[:MOST_LISTED])
    if len(problems) > MOST_LISTED:
        listed += f" and {len(problems) - MOST_LISTED} more"
    raise ConfigError(
        "model.batch_invariant is set, and layers have kernels that compute a token in other ways "
        f"beside other tokens: {listed}. Turn it off, or install a plugin whose kernels do not"
        f"{_packages()}, and keep the weights in float32, or in bfloat16 if oneDNN packs that here"
    )


def _packages() -> str:
    """Name packages with kernels for this platform, if there are any."""
    packages = " or ".join(current_platform().kernel_packages)
    return f", such as {packages}" if packages else ""


def _why_not_alike(layer: nn.Module, block_size: int) -> str | None:
    """Return the reason against a layer; ``None`` for a layer that computes tokens alike."""
    if isinstance(layer, CachedAttention):
        return None if layer.batch_invariant(block_size) else f"attention by {type(layer).__name__}"
    # Looking a row up depends on no other token.
    if isinstance(layer, VocabParallelEmbedding) and layer.looks_up:
        return None
    if isinstance(layer, HasWeightMethod):
        return compute_rows_alike(layer)
    parameters = layer.named_parameters(recurse=False)
    matrices = [name for name, parameter in parameters if parameter.dim() > 1]
    if not matrices:
        return None
    return f"{type(layer).__name__} with its own {', '.join(matrices)}"
