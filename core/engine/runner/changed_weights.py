"""Tell weights that code has changed in memory from a damaged checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from opgraft.base.log import logger
from opgraft.base.text import printable
from opgraft.binding.blame import replacement_of_layer
from opgraft.config.environment import PLUGINS
from opgraft.errors import OpgraftError
from opgraft.models.files import open_weights
from opgraft.models.load import plan_of
from opgraft.models.model import Model
from opgraft.models.names import IGNORED, Targets
from opgraft.ops.weights import LoadedTensor
from opgraft.registry.state import PluginStatus, host_state
from torch import Tensor, nn

_CHANGED = "code has changed it in memory"
_CLASS_OF_LAYER = "The class of the layer is"
_CHUNK = 1 << 24
"""Numbers of a file that are looked at together."""


def changed_weight(model: Model, name: str) -> str:
    """Return a sentence about a weight that holds NaN or infinity, unlike the checkpoint.

    The text is empty if all weights from the files are finite, if the file holds the same, or a
    number that is too large for the dtype of the weight, or if the files are gone. Of the files,
    the tensors of one weight are read.

    Args:
        model: the loaded model.
        name: the folder or file of its checkpoint.
    """
    wrong = {path: each for path, each in model.named_parameters() if not _is_finite(each)}
    if not wrong:
        return ""
    sources = _sources(model, name)
    for path, weight in wrong.items():
        # Other weights, such as scales of a quantization, are computed and not read.
        if id(weight) not in sources:
            continue
        logger.warning("%s", printable(f"the weight {path} is compared with the files of {name}"))
        if not _are_finite(sources[id(weight)], weight.dtype):
            return ""
        layer = model.get_submodule(path.rpartition(".")[0])
        return (
            f"the weight {path} holds NaN or infinity, and the files of {name} hold neither: "
            f"{_CHANGED}. {_suspects(layer)}"
        )
    return ""


def blames_no_plugin(sentence: str) -> bool:
    """Return True if a sentence is one of ``changed_weight``, about a layer without a replacement.

    The program itself, or any code that is loaded, may have changed such a weight.
    """
    return _CHANGED in sentence and _CLASS_OF_LAYER not in sentence


def _sources(model: Model, name: str) -> dict[int, list[LoadedTensor]]:
    """Return the tensors of the files by the ``id`` of the weight that they fill.

    The result is empty if the files cannot be opened.
    """
    try:
        tensors = open_weights(name).tensors
    # The files may have been removed or replaced since.
    except (OpgraftError, OSError):
        return {}
    ignored = (*IGNORED, *model.ignored_weights)
    plan = plan_of(Targets(model), tensors, model.weights_mapper, ignored)
    sources: dict[int, list[LoadedTensor]] = {}
    for target, loaded in plan.fills:
        sources.setdefault(id(target.tensor), []).append(loaded)
    return sources


def _suspects(layer: nn.Module) -> str:
    """Name the class of the layer if it is a replacement, else the active plugins."""
    replacement = replacement_of_layer(layer)
    if replacement:
        return f"{_CLASS_OF_LAYER} {replacement}"
    active = []
    for record in host_state().plugins.values():
        if record.status is PluginStatus.ACTIVATED:
            active.append(f"{record.name} of {record.provider}")
    if active:
        return printable(f"Active plugins: {', '.join(active)}. {PLUGINS}= goes without them")
    return "No plugin is active, so the program has changed it itself"


def _are_finite(tensors: Iterable[LoadedTensor], dtype: torch.dtype) -> bool:
    """Return True if tensors of files are finite as numbers of a dtype."""
    try:
        return all(_is_finite(part.to(dtype)) for each in tensors for part in _parts(each))
    except (OpgraftError, OSError):
        return False


def _parts(tensor: LoadedTensor) -> Iterator[Tensor]:
    """Read a tensor some rows at a time."""
    if not len(tensor.shape):
        yield tensor[...]
        return
    rows = tensor.shape[0]
    step = max(1, _CHUNK * rows // max(1, math.prod(tensor.shape)))
    for start in range(0, rows, step):
        yield tensor[start : start + step]


def _is_finite(x: Tensor) -> bool:
    # Of some dtypes of 8 bits torch cannot tell this.
    numbers = x.float() if x.is_floating_point() and x.itemsize == 1 else x
    return bool(torch.isfinite(numbers).all())
