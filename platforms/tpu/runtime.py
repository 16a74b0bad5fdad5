"""The needs of the TPU platform from the package that gives PyTorch its TPU device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from opgraft.errors import PlatformError
from opgraft.platform import DeviceMemory
from torch import Tensor


class Runtime(ABC):
    """One implementation per package. Creating one imports the package and starts no device."""

    @abstractmethod
    def device_count(self) -> int:
        """Count the devices that this process sees; a chip may be two."""

    @abstractmethod
    def memory(self, index: int) -> DeviceMemory:
        """Return the memory of device ``index``."""

    @abstractmethod
    def synchronize(self, index: int) -> None:
        """Run what was recorded for device ``index`` and wait for it."""

    @abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed the generators of all devices; those of the CPU are seeded already."""

    @abstractmethod
    def compilations(self) -> int:
        """Count the programs that were compiled in this process."""

    def donating(self) -> tuple[Any, ...]:
        """Return an operator, and its arguments behind a tensor, that has a program write to the tensor in place."""
        return ()

    def spread(self) -> None:
        """Have this process compute on all devices that it sees as if they were one.

        Raises:
            PlatformError: the package cannot, or a device was used before.
        """
        raise PlatformError(
            f"parallel.devices_per_rank is above 1, which {type(self).__name__} cannot do: use torch_xla, or "
            "parallel.data"
        )

    def shard(self, tensor: Tensor, dim: int | None) -> None:
        """Divide a tensor along a dimension among the devices, or give it to each; only after ``spread``."""
        raise PlatformError(f"{type(self).__name__} does not divide tensors among devices")

    def placing(self, dims: int, dim: int | None) -> tuple[Any, ...]:
        """Return an operator, and its arguments behind a tensor, that gives it back divided as by ``shard``.

        Args:
            dims: dimensions of the tensor.
            dim: along which it is divided; ``None`` if each device has the whole.
        """
        raise PlatformError(f"{type(self).__name__} does not divide tensors among devices")

    def on_cpu(self) -> bool:
        """Tell whether the devices are simulated on the CPU."""
        return False


class RuntimeOwner:
    """A platform that reaches its devices by a runtime package."""

    runtime: Runtime
