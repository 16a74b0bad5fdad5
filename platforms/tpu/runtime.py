"""The needs of the TPU platform from a package with a TPU device for PyTorch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from opgraft.errors import PlatformError
from opgraft.platform import DeviceMemory
from torch import Tensor


class Runtime(ABC):
    """A runtime package. The constructor imports the package and starts no device."""

    @abstractmethod
    def device_count(self) -> int:
        """Return the number of visible devices. A chip may be two devices."""

    @abstractmethod
    def memory(self, index: int) -> DeviceMemory:
        """Return the memory of device ``index``."""

    @abstractmethod
    def synchronize(self, index: int) -> None:
        """Run the recorded operations of device ``index`` and wait for the end."""

    @abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed the generators of all devices. The generators of the CPU are seeded already."""

    @abstractmethod
    def compilations(self) -> int:
        """Return the number of programs that were compiled in this process."""

    def donating(self) -> tuple[Any, ...]:
        """Return an operator, and arguments behind the tensor, for a write in place."""
        return ()

    def spread(self) -> None:
        """Compute on all visible devices as if they were one.

        Raises:
            PlatformError: the package cannot, or a device was used before.
        """
        raise PlatformError(
            f"parallel.devices_per_rank is above 1, which {type(self).__name__} cannot do: use "
            "torch_xla, or parallel.data"
        )

    def shard(self, tensor: Tensor, dim: int | None) -> None:
        """Divide a tensor along ``dim`` among the devices, after ``spread``. ``None``: copy."""
        raise PlatformError(f"{type(self).__name__} does not divide tensors among devices")

    def placing(self, dims: int, dim: int | None) -> tuple[Any, ...]:
        """Return an operator, and arguments behind the tensor, to divide a tensor in a program.

        Args:
            dims: the number of dimensions of the tensor.
            dim: the divided dimension, or ``None`` if each device has the whole tensor.
        """
        raise PlatformError(f"{type(self).__name__} does not divide tensors among devices")

    def why_alone(self) -> str:
        """Return the reason why processes share no model here; empty if they can."""
        return ""

    def enter_job(self) -> None:  # noqa: B027  # optional
        """Start the device of this process as one of a slice, with the variables of the slice."""

    def number_in_slice(self) -> int | None:
        """Return the runtime's number of this process; ``None`` if the package does not tell."""
        return None

    def on_cpu(self) -> bool:
        """Return True if the CPU simulates the devices."""
        return False


class RuntimeOwner:
    """A platform with a runtime package."""

    runtime: Runtime
