"""Tell weights that code has changed in memory from a damaged checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from opgraft.binding.blame import replacement_of_layer
from opgraft.errors import OpgraftError
from opgraft.models.files import open_weights
from opgraft.models.lazy import LazyTensor
from opgraft.registry.state import PluginStatus, host_state
from torch import Tensor, nn

_CHUNK = 1 << 24
"""Numbers of a file that are looked at together."""


def changed_weight(model: nn.Module, name: str) -> str:
    """Return a sentence about a weight that holds NaN or infinity, unlike the checkpoint.

    The text is empty if all weights are finite, or if the files are damaged or gone. All files are
    read, which may take minutes.

    Args:
        model: the loaded model.
        name: the folder or file of its checkpoint.
    """
    for path, weight in model.named_parameters():
        if not _is_finite(weight) and _is_clean(name):
            layer = model.get_submodule(path.rpartition(".")[0])
            return (
                f"the weight {path} holds NaN or infinity, and the files of {name} hold neither: "
                f"code has changed it in memory. {_suspects(layer)}"
            )
    return ""


def _suspects(layer: nn.Module) -> str:
    """Name the class of the layer if it is a replacement, else the active plugins."""
    replacement = replacement_of_layer(layer)
    if replacement:
        return f"The class of the layer is {replacement}"
    active = []
    for record in host_state().plugins.values():
        if record.status is PluginStatus.ACTIVATED:
            active.append(f"{record.name} of {record.provider}")
    if active:
        return f"Active plugins: {', '.join(active)}. OPGRAFT_PLUGINS= goes without"
    return "No plugin is active, so the program has changed it itself"


def _is_clean(name: str) -> bool:
    """Return True if all tensors of a checkpoint are finite."""
    try:
        tensors = open_weights(name).tensors.values()
        return all(_is_finite(part) for tensor in tensors for part in _parts(tensor))
    # The files may have been removed or replaced since.
    except (OpgraftError, OSError):
        return False


def _parts(tensor: LazyTensor) -> Iterator[Tensor]:
    """Read a tensor some rows at a time."""
    if not tensor.ndim:
        yield tensor[...]
        return
    rows = tensor.shape[0]
    step = max(1, _CHUNK * rows // max(1, tensor.numel()))
    for start in range(0, rows, step):
        yield tensor[start : start + step]


def _is_finite(x: Tensor) -> bool:
    # Of some dtypes of 8 bits torch cannot tell this.
    numbers = x.float() if x.is_floating_point() and x.itemsize == 1 else x
    return bool(torch.isfinite(numbers).all())
