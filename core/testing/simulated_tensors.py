"""Tensors of a simulated accelerator: the numbers are in the memory of the host."""

from __future__ import annotations

import copy
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from opgraft.compat.python_device import (
    class_of_tensors,
    run_own_kernel,
    run_without_device,
    serves_every_device,
    wrapper_of,
    writes_to_arguments,
)
from opgraft.platform import HOST
from opgraft.testing.devices import DEVICE_TYPE, SimulatedDevice
from opgraft.testing.simulated_graphs import recording_graph
from opgraft.testing.simulated_streams import current_stream
from torch import Tensor

_MOVES = frozenset({"aten::copy_", "aten::_to_copy", "aten::set_", "aten::_local_scalar_dense"})
"""Operators for tensors of the host and of a device at once."""


class Running:
    """The running device: the number of kernels so far, and the memory in use.

    Args:
        wait: called with the seconds of a kernel.

    Attributes:
        taken: by address, the number of holders and the bytes.
        in_use: the bytes in use.
    """

    def __init__(self, wait: Callable[[float], object] = time.sleep) -> None:
        self.wait = wait
        self.about = SimulatedDevice()
        self.kernels = 0
        self.taken: dict[int, list[int]] = {}
        self.in_use = 0
        self.lock = threading.RLock()

    def run(self, operator: str) -> None:
        """Count a kernel.

        Raises:
            RuntimeError: the device has failed.
        """
        # Threads may call kernels at once.
        with self.lock:
            self.kernels += 1
            limit = self.about.fails_after
        if limit is not None and self.kernels > limit:
            raise RuntimeError(
                f"{self.about.name} failed: it has run {limit} kernels, and {operator} would be "
                "another"
            )
        if self.about.seconds:
            self.wait(self.about.seconds)

    def hold(self, values: Tensor) -> int | None:
        """Take memory for numbers; return the key for ``free``, ``None`` for no bytes.

        Raises:
            torch.OutOfMemoryError: the memory does not suffice.
        """
        memory = values.untyped_storage()
        place = memory.data_ptr()
        size = memory.nbytes()
        if not size:
            return None
        with self.lock:
            # Views share memory, which counts once.
            if place in self.taken:
                self.taken[place][0] += 1
                return place
            if self.in_use + size > self.about.memory:
                raise torch.OutOfMemoryError(
                    f"{self.about.name} out of memory: {size} bytes were asked for, "
                    f"{self.in_use} of {self.about.memory} are in use"
                )
            self.taken[place] = [1, size]
            self.in_use += size
        return place

    def free(self, place: int | None) -> None:
        """Give back memory; the last holder frees the memory."""
        if place is None:
            return
        with self.lock:
            holders, size = self.taken[place]
            if holders > 1:
                self.taken[place][0] = holders - 1
                return
            del self.taken[place]
            self.in_use -= size
        graph = recording_graph()
        if graph is not None:
            graph.free(place)


_device = Running()


def begin(device: SimulatedDevice) -> None:
    """Describe the device from now on, and count kernels from zero."""
    _device.about = device
    _device.kernels = 0


def bytes_in_use() -> int:
    """Return the bytes of the device's memory in use."""
    return _device.in_use


@class_of_tensors
class SimulatedTensor(Tensor):
    """A tensor of the device.

    Attributes:
        numbers: a tensor of the host with the same strides.
    """

    # Slots: callers copy ``vars(parameter)``, the attributes of loaders, to another parameter.
    __slots__ = ("_give_back", "numbers")

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
        # Memory is freed with the last reference, as on a real device.
        self._give_back = weakref.finalize(self, _device.free, place)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls it on the class
        cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        run = run_own_kernel if serves_every_device(operator) else compute
        return run(operator, *args, **(kwargs or {}))

    @property
    def data(self) -> Tensor:
        """The same numbers without gradients. Another tensor of the device may be assigned."""
        # torch declares no type of the descriptor.
        return Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @data.setter
    def data(self, other: Tensor) -> None:
        if not isinstance(other, SimulatedTensor):
            raise RuntimeError(
                f"a tensor of {other.device} cannot be the data of one of {self.device}: "
                "move it there"
            )
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]  # a descriptor of C
        # The new memory is taken before the former is freed, as on a real device.
        former = self._give_back
        self._hold(other.numbers.detach())
        former()

    # The method of torch has no types.
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{repr(self.numbers)[:-1]}, device='{self.device}')"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _moved, (self.cpu(), self.requires_grad, vars(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> SimulatedTensor:
        if id(self) in memo:
            return cast("SimulatedTensor", memo[id(self)])
        if not self.is_leaf:
            raise RuntimeError(
                f"a tensor of {self.device} that was computed with gradients has no deep copy: "
                "detach it first"
            )
        made = self.detach().clone().requires_grad_(self.requires_grad)
        memo[id(self)] = made
        made.grad = copy.deepcopy(self.grad, memo)
        vars(made).update(copy.deepcopy(vars(self), memo))
        return cast("SimulatedTensor", made)

    def tolist(self) -> Any:
        """Return the numbers as a list."""
        return self.cpu().tolist()

    def untyped_storage(self) -> Any:
        """Return the memory, in the host."""
        return self.numbers.untyped_storage()

    def data_ptr(self) -> int:
        """Return the address of the first number."""
        return self.numbers.data_ptr()


def _moved(values: Tensor, requires_grad: bool, attributes: Mapping[str, Any]) -> Tensor:
    made = values.to(DEVICE_TYPE).requires_grad_(requires_grad)
    vars(made).update(attributes)
    return made


def _run_and_follow(run: Callable[[], Any], ours: Sequence[SimulatedTensor]) -> Any:
    """Run an operator, and have tensors of the device follow numbers of another form."""
    # Noted before, as the call may exchange the memory of a tensor.
    before = [(each, _form(each.numbers), each.numbers.untyped_storage()) for each in ours]
    result = run()
    # An operator such as resize_ changes a tensor in place.
    for each, form, memory in before:
        if _form(each.numbers) != form:
            _follow(each, form, memory)
    return result


def compute(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator of torch on the device.

    Raises:
        RuntimeError: the device has failed, tensors of host and device are mixed, or the device
            does not compute with the dtype of a result.
        torch.OutOfMemoryError: a result does not fit.
    """
    name = operator.name().partition(".")[0]
    values = args, tuple(kwargs.values())
    given = list(_tensors(values))
    ours = [each for each in given if isinstance(each, SimulatedTensor)]
    if not ours and any(each.is_meta for each in given):
        return run_without_device(operator, *args, **kwargs)
    _expect_one_device(name, given, ours)
    stream = current_stream()
    run = functools.partial(_run_operator, operator, name, _on_host(args), _on_host(kwargs))
    graph = recording_graph()
    if graph is not None:
        _expect_no_host(name, given, ours, kwargs)
    elif _can_wait(operator, args, given, ours):
        stream.put(run)
        return ours[0]
    # An operator that makes tensors, or takes those of the host, waits for queued work.
    stream.synchronize()
    # An operator that returns an argument must return the same object.
    known = {id(_on_host(each)): each for each in given}
    result = _run_and_follow(run, ours)
    if graph is not None:
        numbers = [each.numbers for each in ours]
        writes = writes_to_arguments(operator)
        graph.add(name, run, numbers, result, writes)
    if _leaves_device(kwargs.get("device")):
        return result
    return _on_device(result, known, name)


def _can_wait(
    operator: Any, args: Sequence[Any], given: Sequence[Tensor], ours: Sequence[SimulatedTensor]
) -> bool:
    """Return True if a call may run later: it only writes to its first argument, on the device."""
    is_on_device = ours and len(ours) == len(given)
    return bool(is_on_device and ours[0] is args[0] and _only_writes(operator))


def _leaves_device(target: Any) -> bool:
    """Return True for a copy to another device."""
    return target is not None and torch.device(target).type != DEVICE_TYPE


def _expect_one_device(name: str, given: list[Tensor], ours: list[SimulatedTensor]) -> None:
    # A tensor without dimensions may stay on the host, as torch allows for every device.
    foreign = [each for each in given if not isinstance(each, SimulatedTensor) and each.dim()]
    if not ours or not foreign or name in _MOVES or "index" in name:
        return
    raise RuntimeError(
        f"Expected all tensors to be on the same device, but {name} was given one on "
        f"{foreign[0].device} beside one on {ours[0].device}"
    )


def _expect_no_host(
    name: str, given: list[Tensor], ours: list[SimulatedTensor], kwargs: Mapping[str, Any]
) -> None:
    """Check that no numbers come from the host, or go there, while a graph is recorded."""
    target = kwargs.get("device")
    to_host = ours and target is not None and torch.device(target).type != DEVICE_TYPE
    # The number in a tensor without dimensions is an argument of a kernel.
    from_host = any(each.dim() for each in given if not isinstance(each, SimulatedTensor))
    if to_host or from_host:
        raise RuntimeError(
            f"{name} moves numbers between the host and the device, which no recording has"
        )


def _run_operator(operator: Any, name: str, args: Any, kwargs: Any) -> Any:
    _device.run(name)
    return operator(*args, **kwargs)


def _only_writes(operator: Any) -> bool:
    """Return True if an operator does nothing visible but write to the first argument."""
    name = operator.name().partition(".")[0]
    # Collectives end with an underscore too, and return a handle to wait for.
    if operator.namespace != "aten" or not name.endswith("_") or name.startswith("aten::_"):
        return False
    seen = {torch.Tag.inplace_view, torch.Tag.nondeterministic_seeded}
    return seen.isdisjoint(operator.tags)


def _follow(tensor: SimulatedTensor, form: tuple[Any, ...], memory: Any) -> None:
    """Give a tensor the new shape and memory of the numbers, or undo the change."""
    numbers = tensor.numbers
    try:
        tensor.data = SimulatedTensor(numbers)
    except torch.OutOfMemoryError:
        shape, strides, offset, _, size = form
        memory.resize_(size)
        numbers.set_(memory, offset, shape, strides)
        raise


def _form(values: Tensor) -> tuple[Any, ...]:
    """Return shape, strides and offset of numbers, and the address and size of the memory."""
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
    """Return a value with the numbers of tensors, and with the host in place of the device."""
    if isinstance(value, SimulatedTensor):
        return value.numbers
    if isinstance(value, torch.device) and value.type == DEVICE_TYPE:
        return torch.device(HOST)
    if type(value) in (tuple, list):
        return type(value)(map(_on_host, value))
    if type(value) is dict:
        return {name: _on_host(each) for name, each in value.items()}
    return value


def _on_device(value: Any, known: dict[int, Tensor], operator: str) -> Any:
    """Return a result as tensors of the device; an argument stays the same object."""
    if type(value) in (tuple, list):
        return type(value)(_on_device(each, known, operator) for each in value)
    if not isinstance(value, Tensor):
        return value
    if id(value) in known:
        return known[id(value)]
    name = str(value.dtype).removeprefix("torch.")
    # Floats of 8 bits are stored only, and no device computes with them.
    is_computed = value.dtype.is_floating_point and value.itemsize > 1
    if is_computed and name not in _device.about.dtypes:
        raise RuntimeError(f"{_device.about.name} computes no {name}, which {operator} was to give")
    return SimulatedTensor(value)
