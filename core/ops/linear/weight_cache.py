"""Copies of weights that kernels keep in layouts of their own, of weights that were declared frozen.

Not every write to a tensor can be seen from outside of it: fused optimizers, collectives, other processes, numpy,
DLPack and ``.data`` leave no trace. So kernels read the weight itself at each call, unless ``freeze`` has declared that
nobody writes to it.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from opgraft.binding.arguments import expect_module
from opgraft.binding.marks import requires_gradient as requires_gradient
from opgraft.compat.packed_linear import version_of
from opgraft.compat.packed_linear import watched as watched
from opgraft.machine.memory import move_to_huge_pages
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

Storage = weakref.ref[torch.UntypedStorage]


@dataclass(slots=True)
class CacheEntry:
    """A copy of one weight.

    Attributes:
        storage: of the weight. Not a reference to the weight, which ``torch.utils.swap_tensors`` would refuse to swap.
        state: what must not have changed for the copy to be right.
        copy: in the layout of the kernel; ``None`` until it is made.
        calls: that have asked for it before.
    """

    storage: Storage
    state: tuple[object, ...]
    copy: Tensor | None = None
    calls: int = 0


Place: TypeAlias = tuple[int, int, torch.Size]
"""The place of a weight in memory: the ``id`` of its storage, its address, and its shape."""


class WeightCache(dict[Place, CacheEntry]):
    """The copies that one kernel keeps: one for each place in memory, with which it goes.

    Not one for each parameter. ``torch.utils.swap_tensors`` refuses to swap what has weak references, so that nobody
    could tell when a parameter is gone that others have replaced over the same memory.

    Args:
        after: calls of a weight before the copy is made, in which the kernel reads the weight itself. As many as save
            by the copy what it takes to make it; so a first result does not wait for copies.
    """

    def __init__(self, after: int = 0) -> None:
        super().__init__()
        self.after = after
        _CACHES[id(self)] = self

    def copy_of(
        self, weight: Tensor, make: Callable[[Tensor], Tensor], variant: object = None
    ) -> Tensor | None:
        """Return the copy that ``make`` makes of a frozen parameter, made anew when the parameter has changed.

        Args:
            weight: a parameter. No copies are kept of other tensors, such as views, which are often made for one call.
            make: is given the weight without its autograd.
            variant: copies made under another value are not used.

        Returns:
            The copy; ``None`` for what is no parameter, or not declared frozen, and in the first calls: the kernel
            reads the weight itself.
        """
        number = declaration(weight)
        if not number or type(weight) is not nn.Parameter:
            return None
        storage = weight.untyped_storage()
        place = (id(storage), weight.data_ptr(), weight.shape)
        # Each parameter over the same memory counts its own writes.
        state = (id(weight), number, variant, version_of(weight), weight.dtype, weight.stride())
        entry = self.get(place)
        # The id of a storage that is gone may be that of another one.
        if entry is None or entry.storage() is not storage or entry.state != state:
            if weight.is_shared():  # type: ignore[no-untyped-call]  # torch leaves it so
                return None  # processes that were not asked may write to it
            entry = self[place] = CacheEntry(weakref.ref(storage, self._forget(place)), state)
        if entry.copy is None:
            entry.calls += 1
            if entry.calls > self.after:
                entry.copy = make(weight.detach())
        return entry.copy

    def discard(self, changed: Sequence[range]) -> None:
        """Forget the copies of what has memory in common with these addresses."""
        for key, entry in list(self.items()):  # a list: collecting a weight removes its entry
            storage = entry.storage()
            if storage is None or any(_overlap(_addresses(storage), other) for other in changed):
                self.pop(key, None)

    def _forget(self, place: Place) -> Callable[[Storage], None]:
        def forget(gone: Storage) -> None:
            entry = self.get(place)
            if (
                entry is not None and entry.storage is gone
            ):  # a newer storage may have the id by now
                del self[place]

        return forget


_CACHES: weakref.WeakValueDictionary[int, WeightCache] = weakref.WeakValueDictionary()
# By the id of the storage: torch hands out one Python object for it as long as it lives.
_FROZEN: dict[int, tuple[Storage, int]] = {}
_DECLARATIONS = itertools.count(1)


def freeze(target: nn.Module | Tensor) -> None:
    """Declare that nobody writes to the weights below a module, or to one parameter, as they lie in memory now.

    Kernels may then keep copies of them, in layouts in which they compute faster. The parameters require no gradient
    afterwards. Requiring one takes the declaration back, and so does a step of an optimizer that changes them, or
    moving them to other memory, such as by ``.to()``. Copies are made anew after ``load_state_dict`` and other writes
    that torch counts. After any other write, such as through ``.data``, call ``refresh``.

    It holds for memory, and so for tied weights and all that shares it: views of a weight, ``detach()``, ``.data``, and
    parameters made of these. They are frozen with it. Each but views and ``detach()`` counts its own writes: after one
    through another parameter or ``.data``, call ``refresh``. A call of a parameter over the same memory that requires a
    gradient takes the declaration back for all.

    Memory that will be read so often is worth huge pages: a thread has Linux move it there.

    Raises:
        TypeError: ``target`` is neither a module nor a tensor.
    """
    move_to_huge_pages(declare_frozen(_weights(target, "freeze")))


def declare_frozen(weights: Iterable[Tensor]) -> list[range]:
    """Declare of several parameters what ``freeze`` declares of one, and return where they lie; nothing is moved."""
    blocks = []
    for weight in weights:
        weight.requires_grad_(False)
        if _is_plain(weight):
            storage = weight.untyped_storage()
            key = id(storage)
            _FROZEN[key] = (
                weakref.ref(storage, functools.partial(_forget_memory, key)),
                next(_DECLARATIONS),
            )
            blocks.append(_addresses(storage))
    return blocks


def thaw(target: nn.Module | Tensor) -> None:
    """Take back what ``freeze`` has declared."""
    for weight in _weights(target, "thaw"):
        if _is_plain(weight):
            _FROZEN.pop(id(weight.untyped_storage()), None)


def declaration(weight: Tensor) -> int:
    """Return the number of the ``freeze`` that holds for a weight, new with each call of it; 0 where none holds."""
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


_NOT_FROZEN = (None, 0)


def refresh(target: nn.Module | Tensor) -> None:
    """Forget the copies that kernels keep of a parameter, or of all parameters below a module.

    For after a write to a frozen weight that torch does not count, such as ``weight.data.copy_(merged)``. What shares
    memory with the parameters is forgotten too. It also frees the copies until the next call.
    """
    changed = [
        _addresses(weight.untyped_storage())
        for weight in _weights(target, "refresh")
        if _is_plain(weight)
    ]
    for cache in list(_CACHES.values()):
        cache.discard(changed)


def _weights(target: nn.Module | Tensor, what: str) -> list[Tensor]:
    if isinstance(target, Tensor):
        return [target]
    expect_module(what, target)
    return list(target.parameters())


def _addresses(storage: torch.UntypedStorage) -> range:
    return range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())


def _overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


def _forget_memory(key: int, gone: Storage) -> None:
    if _FROZEN.get(key, _NOT_FROZEN)[0] is gone:
        del _FROZEN[key]


def _thaw_trained(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Thaw what a step of any optimizer has changed, whoever said that it is frozen."""
    for group in optimizer.param_groups if _FROZEN else ():
        for weight in group["params"]:
            if weight.grad is not None and _is_plain(weight):
                _FROZEN.pop(id(weight.untyped_storage()), None)


register_optimizer_step_post_hook(_thaw_trained)


def _is_plain(weight: Tensor) -> bool:
    """Tell whether a weight is ordinary CPU memory that counts how often torch writes to it."""
    kind = type(weight) is nn.Parameter or type(weight) is Tensor
    return kind and weight.is_cpu and weight.layout is torch.strided and not weight.is_inference()


def fits(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> bool:
    """Tell whether arguments of a linear layer have shapes and dtypes that a kernel takes without its own checks."""
    rows, columns = weight.shape
    shape, dtype = x.shape, weight.dtype
    if shape[-1:] != (columns,) or (
        bias is not None and (bias.shape != (rows,) or not bias.is_contiguous())
    ):
        return False
    if residual is not None and residual.shape != (*shape[:-1], rows):
        return False
    for other in (x, bias, residual):
        if other is not None and not (
            other.dtype is dtype and other.is_cpu and other.layout is torch.strided
        ):
            return False
    return True
