"""Parameters that are parts of mapped files, so that loading copies nothing."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from itertools import pairwise
from threading import Thread

import torch
from opgraft.machine.memory import HugeBlocks, bytes_in_files, forget_pages, move_from_files
from opgraft.models.lazy import FilePart, LazyTensor
from opgraft.ops.weights import WeightCopy
from torch import Tensor, nn

LEAST_BYTES = 1 << 16
"""Smaller parameters are copied: a page of a file has several of them."""


class MappedWeights:
    """The parameters of a model that are parts of mapped files.

    A parameter is one if the bytes of its tensors follow one another in the file, in its dtype.
    Writes to the parameter do not reach the file.
    """

    def __init__(self) -> None:
        self._placed: list[tuple[weakref.ref[torch.UntypedStorage], FilePart]] = []
        self._blocks = HugeBlocks()

    def take(self, parameter: Tensor, copies: Sequence[WeightCopy]) -> bool:
        """Make a parameter a part of a file if copies would write exactly that part to it.

        Args:
            parameter: a parameter in memory of its own.
            copies: all copies that fill the parameter.

        Returns:
            True if no copy is needed any more.
        """
        if not _is_plain(parameter):
            return False
        part = _part_of(parameter, copies)
        if part is None:
            self._move(parameter)
            return False
        self._place(parameter, part)
        return True

    def _move(self, parameter: Tensor) -> None:
        """Let a parameter without numbers have its memory in huge pages, which fill sooner."""
        found = self._blocks.take(parameter.nbytes)
        if found is not None:
            self._place(parameter, FilePart(*found, parameter.nbytes))

    def _place(self, parameter: Tensor, part: FilePart) -> None:
        numbers = torch.frombuffer(
            part.memory, dtype=parameter.dtype, count=parameter.numel(), offset=part.start
        )
        parameter.data = numbers.view(parameter.shape)
        # A hook may wrap the numbers in another parameter, so the storage tells how long they live.
        self._placed.append((weakref.ref(numbers.untyped_storage()), part))

    def forget(self) -> None:
        """Give pages back that no tensor needs any more, as after packing."""
        kept = []
        for storage, part in self._placed:
            if storage() is None:
                forget_pages(part.memory, part.start, part.size)
            else:
                kept.append((storage, part))
        self._placed = kept


def leave_files(model: nn.Module, wait: float) -> Thread | None:
    """Move the weights of a model from mapped files to memory of this process, on a thread.

    Args:
        model: nobody writes to its weights meanwhile. A model that is gone by then is left out.
        wait: seconds until the thread begins.

    Returns:
        The thread, or ``None`` if no weight is in a file.
    """
    if not bytes_in_files(addresses_of(model)):
        return None
    storages = []
    for parameter in model.parameters():
        if _has_addresses(parameter):
            # Weak, so that the thread does not keep a model in memory while it waits.
            storages.append(weakref.ref(parameter.untyped_storage()))
    thread = Thread(target=_leave, args=(storages, wait), name="opgraft-own-pages", daemon=True)
    thread.start()
    return thread


def _leave(storages: Sequence[weakref.ref[torch.UntypedStorage]], wait: float) -> None:
    time.sleep(wait)
    # The files stay mapped as long as one of their storages is held here.
    held = []
    blocks = []
    for weak in storages:
        storage = weak()
        if storage is not None:
            held.append(storage)
            begin = storage.data_ptr()
            blocks.append(range(begin, begin + storage.nbytes()))
    move_from_files(blocks)


def addresses_of(model: nn.Module) -> Iterator[range]:
    """Yield the addresses of parameters in the memory of the CPU."""
    for parameter in model.parameters():
        if _has_addresses(parameter):
            begin = parameter.data_ptr()
            yield range(begin, begin + parameter.nbytes)


def _has_addresses(parameter: Tensor) -> bool:
    return parameter.is_cpu and parameter.layout is torch.strided


def _is_plain(parameter: Tensor) -> bool:
    """Return True if a parameter is in memory of the CPU that it shares with no other tensor."""
    # A subclass may hold its numbers elsewhere.
    if type(parameter) is not nn.Parameter or not parameter.is_cpu:
        return False
    return parameter.is_contiguous() and parameter.untyped_storage().nbytes() == parameter.nbytes


def _part_of(parameter: Tensor, copies: Sequence[WeightCopy]) -> FilePart | None:
    """Return the part of a file with the numbers of a whole parameter, if there is one."""
    parts = []
    place = parameter.data_ptr()
    end = place + parameter.nbytes
    # The parts of a merged weight may be copied in any order.
    for copy in sorted(copies, key=lambda copy: copy.target.data_ptr()):
        part = _place_of(copy, parameter.dtype)
        if part is None or copy.target.data_ptr() != place:
            return None
        parts.append(part)
        place += part.size
    # Other bytes of the parameter have no copy.
    if place != end:
        return None
    for former, part in pairwise(parts):
        follows = part.start == former.start + former.size
        if part.memory is not former.memory or not follows:
            return None
    memory, start, _ = parts[0]
    # torch refuses numbers between two of their places.
    if start % parameter.itemsize:
        return None
    return FilePart(memory, start, parameter.nbytes)


def _place_of(copy: WeightCopy, dtype: torch.dtype) -> FilePart | None:
    """Return the part of a file that is byte for byte the target of a copy, if there is one."""
    target, loaded = copy
    if not isinstance(loaded, LazyTensor) or loaded.dtype != dtype:
        return None
    part = loaded.place()
    if part is None or part.size != target.nbytes or not target.is_contiguous():
        return None
    return part
