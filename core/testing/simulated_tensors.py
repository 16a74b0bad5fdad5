"""Tensors of a simulated accelerator: each has its numbers in the memory of the host, where torch computes them."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from opgraft.compat.python_device import without_functions, wrapper_of
from opgraft.platform import HOST
from opgraft.testing.devices import DEVICE_TYPE, SimulatedDevice
from opgraft.testing.simulated_streams import current_stream
from torch import Tensor

_MOVES = frozenset({"aten::copy_", "aten::_to_copy", "aten::set_", "aten::_local_scalar_dense"})
"""Operators that take tensors of the host and of a device at once."""


class Running:
    """The running device: how many kernels it has run, and which memory is taken.

    Args:
        wait: takes the seconds of a kernel.
    """

    def __init__(self, wait: Callable[[float], object] = time.sleep) -> None:
        self.wait = wait
        self.about = SimulatedDevice()
        self.kernels = 0
        self.taken: dict[int, list[int]] = {}
        self.lock = threading.RLock()

    def run(self, operator: str) -> None:
        """Count a kernel.

        Raises:
            RuntimeError: the device has failed.
        """
        with self.lock:
            self.kernels += 1
            limit = self.about.fails_after
        if limit is not None and self.kernels > limit:
            raise RuntimeError(
                f"{self.about.name} failed: it has run {limit} kernels, and {operator} would be another"
            )
        if self.about.seconds:
            self.wait(self.about.seconds)

    def hold(self, values: Tensor) -> int | None:
        """Take memory for numbers; returns by which number to free it.

        Raises:
            torch.OutOfMemoryError: there is not enough.
        """
        memory = values.untyped_storage()
        place, size = memory.data_ptr(), memory.nbytes()
        with self.lock:
            if place in self.taken:
                self.taken[place][0] += 1
            elif self.in_use() + size > self.about.memory:
                raise torch.OutOfMemoryError(
                    f"{self.about.name} out of memory: {size} bytes were asked for, {self.in_use()} of "
                    f"{self.about.memory} are in use"
                )
            elif size:
                self.taken[place] = [1, size]
        return place if size else None

    def free(self, place: int | None) -> None:
        """Give memory back that nothing holds any more."""
        if place is None:
            return
        with self.lock:
            self.taken[place][0] -= 1
            if not self.taken[place][0]:
                del self.taken[place]

    def in_use(self) -> int:
        """Return the bytes that are taken."""
        return sum(size for _, size in self.taken.values())


_device = Running()


def begin(device: SimulatedDevice) -> None:
    """Have the device be like that from now on, with no kernel run."""
    _device.about, _device.kernels = device, 0


def bytes_in_use() -> int:
    """Return the bytes of the device's memory that tensors take."""
    return _device.in_use()


@without_functions
class SimulatedTensor(Tensor):
    """A tensor of the device.

    Attributes:
        numbers: in the memory of the host, with the same strides.
    """

    numbers: Tensor
    _give_back: Callable[[], object]

    @staticmethod
    def __new__(cls, values: Tensor) -> SimulatedTensor:
        made: SimulatedTensor = wrapper_of(cls, values, torch.device(DEVICE_TYPE, 0))
        made._hold(values)
        return made

    def _hold(self, values: Tensor) -> None:
        place = _device.hold(values)
        self.numbers = values
        self._give_back = weakref.finalize(self, _device.free, place)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls it on the class
        cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return compute(operator, *args, **(kwargs or {}))

    @property
    def data(self) -> Tensor:
        """The same numbers, without gradients; another tensor of the device may take their place."""
        return Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]  # a descriptor of C

    @data.setter
    def data(self, other: Tensor) -> None:
        if not isinstance(other, SimulatedTensor):
            raise RuntimeError(
                f"a tensor of {other.device} cannot be the data of one of {self.device}: move it there"
            )
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]  # a descriptor of C
        former = self._give_back
        self._hold(other.numbers.detach())
        former()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch leaves it untyped
        return f"{repr(self.numbers)[:-1]}, device='{self.device}')"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _moved, (self.cpu(), self.requires_grad)

    def tolist(self) -> Any:
        """Return the numbers, which leave the device for it."""
        return self.cpu().tolist()

    def untyped_storage(self) -> Any:
        """Return the memory, which is that of the host."""
        return self.numbers.untyped_storage()

    def data_ptr(self) -> int:
        """Return the address of the first number."""
        return self.numbers.data_ptr()


def _moved(values: Tensor, requires_grad: bool) -> Tensor:
    return values.to(DEVICE_TYPE).requires_grad_(requires_grad)


def compute(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator of torch on the device.

    Raises:
        RuntimeError: the device has failed, tensors of the host are among those of the device, or a result has a dtype
            that it does not compute with.
        torch.OutOfMemoryError: a result does not fit.
    """
    name = operator.name().partition(".")[0]
    given = list(_tensors((args, tuple(kwargs.values()))))
    ours = [each for each in given if isinstance(each, SimulatedTensor)]
    foreign = [each for each in given if not isinstance(each, SimulatedTensor) and each.dim()]
    if ours and foreign and name not in _MOVES and "index" not in name:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {name} was given one on {foreign[0].device} beside "
            f"one on {ours[0].device}"
        )
    stream = current_stream()
    if ours and len(ours) == len(given) and ours[0] is args[0] and _only_writes(operator):
        stream.put(functools.partial(_run, operator, name, _on_host(args), _on_host(kwargs)))
        return ours[0]
    stream.synchronize()  # what makes tensors, or takes those of the host, waits for what is queued
    known = {id(_on_host(each)): each for each in given}
    before = [
        (each, each.numbers, _form(each.numbers), each.numbers.untyped_storage()) for each in ours
    ]
    result = _run(operator, name, _on_host(args), _on_host(kwargs))
    for each, numbers, form, memory in before:
        if _form(numbers) != form:
            _follow(each, numbers, form, memory)
    target = kwargs.get("device")
    if target is not None and torch.device(target).type != DEVICE_TYPE:
        return result
    return _on_device(result, known, name)


def _run(operator: Any, name: str, args: Any, kwargs: Any) -> Any:
    _device.run(name)
    return operator(*args, **kwargs)


def _only_writes(operator: Any) -> bool:
    """Tell whether an operator writes numbers to its first argument, and does nothing else that can be seen."""
    name, tags = operator.name().partition(".")[0], operator.tags
    seen = torch.Tag.inplace_view in tags or torch.Tag.nondeterministic_seeded in tags
    return name.endswith("_") and not name.startswith("aten::_") and not seen


def _follow(tensor: SimulatedTensor, numbers: Tensor, form: tuple[Any, ...], memory: Any) -> None:
    """Give a tensor the shape and the memory that its numbers have got in place; what does not fit is taken back."""
    try:
        tensor.data = SimulatedTensor(numbers)
    except torch.OutOfMemoryError:
        shape, strides, offset, _, size = form
        memory.resize_(size)
        numbers.set_(memory, offset, shape, strides)
        raise


def _form(values: Tensor) -> tuple[Any, ...]:
    """Return how numbers lie in memory, with the address and the size of that."""
    memory = values.untyped_storage()
    return (
        tuple(values.shape),
        values.stride(),
        values.storage_offset(),
        memory.data_ptr(),
        memory.nbytes(),
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)


def _on_host(value: Any) -> Any:
    """Return a value with the numbers of tensors, and with the host in the place of the device."""
    if isinstance(value, SimulatedTensor):
        return value.numbers
    if isinstance(value, torch.device) and value.type == DEVICE_TYPE:
        return torch.device(HOST)
    if type(value) in (tuple, list):
        return type(value)(map(_on_host, value))
    return {name: _on_host(each) for name, each in value.items()} if type(value) is dict else value


def _on_device(value: Any, known: dict[int, Tensor], operator: str) -> Any:
    """Return a result as tensors of the device; what was an argument is that argument."""
    if isinstance(value, Tensor):
        if id(value) in known:
            return known[id(value)]
        name = str(value.dtype).removeprefix("torch.")
        if (
            value.dtype.is_floating_point
            and value.itemsize > 1
            and name not in _device.about.dtypes
        ):
            raise RuntimeError(
                f"{_device.about.name} computes no {name}, which {operator} was to give"
            )
        return SimulatedTensor(value)
    if type(value) in (tuple, list):
        return type(value)(_on_device(each, known, operator) for each in value)
    return value
