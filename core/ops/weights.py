"""Weights as they are loaded: read in parts, and copied to the parameter that they are for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from opgraft.base.text import described
from opgraft.errors import OpgraftError, WeightError, raised_at
from opgraft.plugins.discovery import discover
from torch import Tensor, nn


@runtime_checkable
class LoadedTensor(Protocol):
    """A tensor of a checkpoint that may not have been read yet; every ``torch.Tensor`` is one.

    ``narrow`` reads nothing, an index reads the part that it asks for, and ``parameter.copy_(loaded)`` fills a
    parameter, converting to its dtype, without ever holding the whole.
    """

    @property
    def shape(self) -> Any:
        """The sizes."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that reading gives."""

    def narrow(self, dim: int, start: int, length: int, /) -> Any:
        """Return the part ``[start, start + length)`` of one dimension."""

    def __getitem__(self, index: Any, /) -> Tensor:
        """Read a part: slices, one per dimension, or ``...`` for everything."""


class WeightMethod:
    """A module that holds and applies the weights of the layer that has it, and is called by that layer only."""


@runtime_checkable
class PostLoadHook(Protocol):
    """A module that changes its weights when they have been loaded."""

    def process_weights_after_loading(self) -> None:
        """Bring the weights into the layout that the module computes with."""


@runtime_checkable
class ReleasesWeights(Protocol):
    """A module that can take back what its hook has made of its weights."""

    def release_weights(self) -> None:
        """Make the weights what they were when they had been loaded, also after a hook that raised half-way."""


def has_post_load_hook(module: nn.Module) -> TypeGuard[PostLoadHook]:
    """Tell whether a module is to be called when its weights have been loaded."""
    return isinstance(module, PostLoadHook) and not isinstance(module, WeightMethod)


def process_weights_after_loading(model: nn.Module) -> None:
    """Call the hook of every module below ``model`` that has one, and its own: a module after those that it holds.

    Raises:
        WeightError: a hook raised; the message names the module's path.
    """
    for path, module in reversed(list(model.named_modules())):
        if has_post_load_hook(module):
            call_post_load_hook(path, module)


def call_post_load_hook(path: str, module: PostLoadHook) -> None:
    """Call a module's hook, which may be a plugin's.

    Raises:
        WeightError: it raised; the message names ``path``, by which the model has the module. An error of opgraft's
            own, or of memory, says enough and stays as it is.
    """
    try:
        module.process_weights_after_loading()
    except (OpgraftError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        cls = type(module)
        provider = discover().provider_of(cls.__module__)
        raise WeightError(
            f"process_weights_after_loading of {path!r}, a {cls.__qualname__} of {provider}, raised at "
            f"{raised_at(error)}",
            described(error),
        ) from error


def set_weight_attrs(weight: Tensor, attributes: Mapping[str, Any] | None) -> None:
    """Put attributes on a parameter, such as the dimensions that are cut and the function that loads it.

    Raises:
        WeightError: one would be overwritten.
    """
    for name, value in (attributes or {}).items():
        if hasattr(weight, name):
            raise WeightError(
                f"a weight has the attribute {name!r} already: create_weights sets each once"
            )
        setattr(weight, name, value)


def copy_weight(target: Tensor, loaded: LoadedTensor, what: str) -> None:
    """Read a weight and copy it to a parameter, or to a part of one.

    Raises:
        WeightError: they have different shapes. A single number fits whatever holds one.
    """
    one = target.numel() == 1 and _count(loaded.shape) == 1
    if tuple(target.shape) != tuple(loaded.shape) and not one:
        raise WeightError.of_shape(what, loaded.shape, tuple(target.shape))
    source: Any = loaded[...].reshape(target.shape) if one else loaded
    with torch.no_grad():
        target.copy_(source)


def _count(shape: Any) -> int:
    return torch.Size(shape).numel()


def default_weight_loader(param: Tensor, loaded_weight: LoadedTensor) -> None:
    """Copy a whole weight to a parameter that has no ``weight_loader`` of its own.

    Raises:
        WeightError: they have different shapes.
    """
    copy_weight(param.data, loaded_weight, "a weight")
