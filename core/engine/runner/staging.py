"""Integers of a step, on their way from Python to a device."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import torch
from opgraft.platform import HOST
from torch import Tensor

_CODES = {torch.int32: "i", torch.int64: "q"}


class Staging:
    """Memory of the host, made once, that integers of a step are written to.

    Args:
        size: the most integers of a step.
        dtype: ``torch.int32`` or ``torch.int64``.

    Attributes:
        tensor: the memory.
    """

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self._code = _CODES[dtype]
        # So it stays where it is.
        self._memory = memoryview(array(self._code, bytes(size * dtype.itemsize)))
        self.tensor = torch.frombuffer(self._memory, dtype=dtype)

    def write(self, values: Iterable[int]) -> None:
        """Write values to the beginning of the memory, over those that were written before."""
        given = array(self._code, values)
        self._memory[: len(given)] = given


class Sender:
    """The way of tensors from the host to a device; on the host itself they stay what they are.

    What is sent to a device goes through pinned memory where there is such, so that the host need
    not wait. torch keeps that memory, and gives it out again once the copy is made.

    Args:
        device: where they go.

    Attributes:
        stays: whether that is the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stays = device.type == HOST
        self._pins = not self.stays and _has_pinned_memory()

    def send(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the host on the device."""
        if self.stays:
            return tensor
        return (
            tensor.pin_memory().to(self._device, non_blocking=True)
            if self._pins
            else tensor.to(self._device)
        )


def _has_pinned_memory() -> bool:
    try:
        return torch.zeros(1).pin_memory().is_pinned()
    except RuntimeError:  # there is no accelerator of torch's, or it knows of no such memory
        return False
