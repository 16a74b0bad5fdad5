"""The loading of weights: parts of a checkpoint are read, and copied to parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol, TypeGuard, TypeVar, runtime_checkable

import torch
from opgraft.base.text import described
from opgraft.errors import OpgraftError, WeightError, raised_at
from opgraft.plugins.discovery import discover
from torch import Tensor, nn


@runtime_checkable
class LoadedTensor(Protocol):
    """A tensor of a checkpoint, perhaps not read yet. Every ``torch.Tensor`` is one.

    ``narrow`` reads nothing, and an index reads a part. ``parameter.copy_(loaded)`` fills a
    parameter in its dtype, and never holds the whole tensor.
    """

    @property
    def shape(self) -> Any:
        """The sizes."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parts that are read."""

    def narrow(self, dim: int, start: int, length: int, /) -> Any:
        """Return the part ``[start, start + length)`` of one dimension."""

    def __getitem__(self, index: Any, /) -> Tensor:
        """Read a part: slices, one per dimension, or ``...`` for everything."""


class WeightMethod:
    """A module that holds and applies the weights of a layer. Only this layer calls the module."""


class PostLoadHook(Protocol):
    """A module with a hook to change loaded weights."""

    def process_weights_after_loading(self) -> None:
        """Bring the weights into the layout of the module's kernels."""


@runtime_checkable
class ReleasesWeights(Protocol):
    """A module that can undo the change of its hook."""

    def release_weights(self) -> None:
        """Restore the loaded weights, also after a hook that raised half-way."""


def has_post_load_hook(module: nn.Module) -> TypeGuard[PostLoadHook]:
    """Return True if the hook of a module must run after the loading of weights."""
    # Asking hundreds of modules for a protocol takes a tenth of a second on Python 3.11.
    has_hook = hasattr(module, "process_weights_after_loading")
    return has_hook and not isinstance(module, WeightMethod)


def process_weights_after_loading(model: nn.Module) -> None:
    """Call the hooks of ``model`` and of all modules below, children first.

    Raises:
        WeightError: a hook raised; the message names the module's path.
    """
    # Reversed, as a module comes before its children in named_modules.
    for path, module in reversed(list(model.named_modules())):
        if has_post_load_hook(module):
            call_post_load_hook(path, module)


def call_post_load_hook(path: str, module: PostLoadHook) -> None:
    """Call the hook of a module.

    Args:
        path: the path of the module in the model.
        module: the module, perhaps of a plugin.

    Raises:
        WeightError: the hook raised; the message names ``path``. An error of opgraft's own, or of
            memory, passes unchanged.
    """
    try:
        module.process_weights_after_loading()
    except (OpgraftError, MemoryError, torch.OutOfMemoryError):
        raise
    # A plugin may raise anything.
    except Exception as error:
        cls = type(module)
        provider = discover().provider_of(cls.__module__)
        raise WeightError(
            f"process_weights_after_loading of {path!r}, a {cls.__qualname__} of {provider}, "
            f"raised at {raised_at(error)}",
            described(error),
        ) from error


def set_weight_attrs(weight: Tensor, attributes: Mapping[str, Any] | None) -> None:
    """Set attributes of a parameter, such as the dimensions to cut and the loader.

    Raises:
        WeightError: the parameter has such an attribute.
    """
    for name, value in (attributes or {}).items():
        if hasattr(weight, name):
            raise WeightError(
                f"a weight has the attribute {name!r} already: create_weights sets each once"
            )
        setattr(weight, name, value)


class WeightCopy(NamedTuple):
    """A tensor of a checkpoint, and the part of a parameter that gets its numbers."""

    target: Tensor
    loaded: LoadedTensor


_NOTED: ContextVar[list[WeightCopy] | None] = ContextVar("opgraft_noted_copies", default=None)

_Loader = TypeVar("_Loader", bound=Callable[..., None])


def only_copies(loader: _Loader) -> _Loader:
    """Mark a ``weight_loader`` that fills a parameter by ``copy_weight`` alone.

    Such a parameter may become a part of the mapped file, without a copy. The loader may also write
    to other parts of the parameter.
    """
    vars(loader)["only_copies"] = True
    return loader


def is_only_copying(loader: object) -> bool:
    """Return True if a loader is marked by ``only_copies``."""
    return bool(getattr(loader, "only_copies", False))


@contextmanager
def noted_copies() -> Iterator[list[WeightCopy]]:
    """Make ``copy_weight`` note copies of this thread, and copy nothing, within the block."""
    noted: list[WeightCopy] = []
    token = _NOTED.set(noted)
    try:
        yield noted
    finally:
        _NOTED.reset(token)


def copy_weight(target: Tensor, loaded: LoadedTensor, what: str) -> None:
    """Read a weight and copy it to a parameter, or to a part of one.

    Raises:
        WeightError: the shapes differ. A single number fits every shape with one element.
    """
    is_one_number = target.numel() == 1 and torch.Size(loaded.shape).numel() == 1
    if tuple(target.shape) != tuple(loaded.shape) and not is_one_number:
        raise WeightError.of_shape(what, loaded.shape, tuple(target.shape))
    noted = _NOTED.get()
    if noted is not None and not is_one_number:
        noted.append(WeightCopy(target, loaded))
        return
    source: Any = loaded[...].reshape(target.shape) if is_one_number else loaded
    with torch.no_grad():
        target.copy_(source)


@only_copies
def default_weight_loader(param: Tensor, loaded_weight: LoadedTensor) -> None:
    """Copy a whole weight to a parameter without a ``weight_loader``.

    Raises:
        WeightError: the shapes differ.
    """
    copy_weight(param.data, loaded_weight, "a weight")
