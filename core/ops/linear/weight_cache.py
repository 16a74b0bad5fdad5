"""Copies of frozen weights in the layouts of kernels.

Fused optimizers, collectives, other processes, numpy, DLPack and ``.data`` write to a tensor
without a trace. So kernels read a weight at each call, unless somebody declared the weight frozen:
see ``opgraft.freeze``.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from opgraft.binding.marks import requires_gradient as requires_gradient
from opgraft.compat.packed_linear import version_of
from opgraft.compat.packed_linear import watched as watched
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

Storage = weakref.ref[torch.UntypedStorage]


@dataclass(slots=True)
class CacheEntry:
    """A copy of one weight.

    Attributes:
        storage: of the weight. A reference to the weight would make ``torch.utils.swap_tensors``
            refuse to swap the weight.
        state: the copy is right until this state of the weight changes.
        copy: in the layout of the kernel; ``None`` until made.
        calls: the number of former requests for the copy.
    """

    storage: Storage
    state: tuple[object, ...]
    copy: Tensor | None = None
    calls: int = 0


Place: TypeAlias = tuple[int, int, torch.Size]
"""The place of a weight in memory: the ``id`` of the storage, the address, and the shape."""


class WeightCache(dict[Place, CacheEntry]):
    """The copies of one kernel: one for each place in memory, freed with that memory.

    Copies do not belong to parameters, because ``torch.utils.swap_tensors`` refuses to swap tensors
    with weak references. Without such a reference, a new parameter over the memory of a former one
    would look the same.

    Args:
        after: calls of a weight before the copy is made. The kernel reads the weight in these
            calls, so a first result does not wait for copies. Choose the number of calls that a
            copy must serve to save the time of making the copy.
    """

    def __init__(self, after: int = 0) -> None:
        super().__init__()
        self.after = after
        _CACHES[id(self)] = self

    def copy_of(
        self, weight: Tensor, make: Callable[[Tensor], Tensor], variant: object = None
    ) -> Tensor | None:
        """Return the copy of a frozen parameter, made again if the parameter has changed.

        Args:
            weight: a parameter. Other tensors have no copies: views are often made for one call.
            make: makes the copy of the detached weight.
            variant: a copy serves calls with an equal variant only.

        Returns:
            The copy. ``None`` for the first calls and for other tensors than frozen parameters:
            the kernel reads the weight.
        """
        number = declaration(weight)
        if not number or type(weight) is not nn.Parameter:
            return None

        storage = weight.untyped_storage()
        place = (id(storage), weight.data_ptr(), weight.shape)
        # Each parameter over the same memory counts its own writes.
        state = (id(weight), number, variant, version_of(weight), weight.dtype, weight.stride())
        entry = self.get(place)

        # A new storage may have the id of one that is gone.
        if entry is None or entry.storage() is not storage or entry.state != state:
            if weight.is_shared():  # type: ignore[no-untyped-call]  # torch leaves it so
                return None  # a process that nobody asked may write to it
            entry = self[place] = CacheEntry(weakref.ref(storage, self._forget(place)), state)

        if entry.copy is None:
            entry.calls += 1
            if entry.calls > self.after:
                entry.copy = make(weight.detach())
        return entry.copy

    def discard(self, changed: Sequence[range]) -> None:
        """Forget the copies of memory at these addresses."""
        for place, entry in list(self.items()):  # a list: collecting a weight removes its entry
            storage = entry.storage()
            if storage is None or any(_overlap(_addresses(storage), other) for other in changed):
                self.pop(place, None)

    def _forget(self, place: Place) -> Callable[[Storage], None]:
        def forget(gone: Storage) -> None:
            entry = self.get(place)
            # A newer storage may have the same place by now.
            if entry is not None and entry.storage is gone:
                del self[place]

        return forget


_CACHES: weakref.WeakValueDictionary[int, WeightCache] = weakref.WeakValueDictionary()
# By the id of the storage: torch hands out one Python object for a storage as long as it lives.
_FROZEN: dict[int, tuple[Storage, int]] = {}
_NOT_FROZEN = (None, 0)
_NUMBERS = itertools.count(1)


def declare_frozen(weights: Iterable[Tensor]) -> list[range]:
    """Declare these weights frozen, and return their addresses."""
    blocks = []
    for weight in weights:
        weight.requires_grad_(False)
        if not _is_plain(weight):
            continue
        storage = weight.untyped_storage()
        key = id(storage)
        forget = functools.partial(_forget_memory, key)
        _FROZEN[key] = (weakref.ref(storage, forget), next(_NUMBERS))
        blocks.append(_addresses(storage))
    return blocks


def withdraw(weights: Iterable[Tensor]) -> None:
    """Take back the declaration of ``declare_frozen``."""
    for weight in weights:
        if _is_plain(weight):
            _FROZEN.pop(id(weight.untyped_storage()), None)


def forget_copies(weights: Iterable[Tensor]) -> None:
    """Forget all copies of memory that overlaps with the memory of these weights."""
    changed = [_addresses(each.untyped_storage()) for each in weights if _is_plain(each)]
    for cache in list(_CACHES.values()):
        cache.discard(changed)


def declaration(weight: Tensor) -> int:
    """Return the number of the ``freeze`` of a weight; 0 for a weight that is not frozen.

    Each ``freeze`` has a new number.
    """
    if not _FROZEN or not _is_plain(weight):
        return 0

    storage = weight.untyped_storage()
    declared, number = _FROZEN.get(id(storage), _NOT_FROZEN)
    if declared is None or declared() is not storage:
        return 0
    if weight.requires_grad:
        del _FROZEN[id(storage)]
        return 0
    return number


def _addresses(storage: torch.UntypedStorage) -> range:
    return range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())


def _overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


def _forget_memory(key: int, gone: Storage) -> None:
    if _FROZEN.get(key, _NOT_FROZEN)[0] is gone:
        del _FROZEN[key]


def _withdraw_trained(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Take back the declaration of all weights with a gradient, after a step of any optimizer."""
    if not _FROZEN:
        return
    for group in optimizer.param_groups:
        withdraw(weight for weight in group["params"] if weight.grad is not None)


register_optimizer_step_post_hook(_withdraw_trained)


def _is_plain(weight: Tensor) -> bool:
    """Return True for ordinary CPU memory with a count of torch's writes."""
    if type(weight) is not nn.Parameter and type(weight) is not Tensor:
        return False
    return weight.is_cpu and weight.layout is torch.strided and not weight.is_inference()


def fits(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> bool:
    """Return True if a kernel without checks of its own takes these arguments of a linear layer."""
    rows, columns = weight.shape
    shape, dtype = x.shape, weight.dtype
    if shape[-1:] != (columns,):
        return False
    if bias is not None and (bias.shape != (rows,) or not bias.is_contiguous()):
        return False
    if residual is not None and residual.shape != (*shape[:-1], rows):
        return False

    for other in (x, bias, residual):
        if other is None:
            continue
        if other.dtype is not dtype or not other.is_cpu or other.layout is not torch.strided:
            return False
    return True
