"""Integers of a step, on their way from Python to a device."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import torch
from opgraft.platform import HOST
from torch import Tensor

_CODES = {torch.int32: "i", torch.int64: "q"}


class Staging:
    """Memory of the host for the integers of a step, made once.

    Args:
        size: the most integers of a step.
        dtype: ``torch.int32`` or ``torch.int64``.

    Attributes:
        tensor: the memory.
    """

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self._code = _CODES[dtype]
        # A view keeps the array at its place, for the tensor below.
        self._memory = memoryview(array(self._code, bytes(size * dtype.itemsize)))
        self.tensor = torch.frombuffer(self._memory, dtype=dtype)

    def write(self, values: Iterable[int]) -> None:
        """Write values to the beginning of the memory."""
        given = array(self._code, values)
        self._memory[: len(given)] = given


class Sender:
    """Sends tensors of the host to a device. If the device is the host, tensors stay the same.

    If there is pinned memory, tensors go through such memory, so that the host need not wait. torch
    keeps the memory, and reuses it once a copy is made.

    Args:
        device: the target.

    Attributes:
        stays: True if the device is the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stays = device.type == HOST
        self._pins = not self.stays and _has_pinned_memory()

    def send(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the host on the device."""
        if self.stays:
            return tensor
        if not self._pins:
            return tensor.to(self._device)
        return tensor.pin_memory().to(self._device, non_blocking=True)


def _has_pinned_memory() -> bool:
    try:
        return torch.zeros(1).pin_memory().is_pinned()
    # torch knows no accelerator, or the accelerator has no such memory.
    except RuntimeError:
        return False
