"""The needs of the TPU platform from the package that gives PyTorch its TPU device."""

from __future__ import annotations

from abc import ABC, abstractmethod

from opgraft.platform import DeviceMemory


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

    def on_cpu(self) -> bool:
        """Tell whether the devices are simulated on the CPU."""
        return False
