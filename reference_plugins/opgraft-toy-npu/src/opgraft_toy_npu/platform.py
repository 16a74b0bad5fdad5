"""The device as the host sees it."""

from __future__ import annotations

import torch
from opgraft import Device, DeviceCapability, DeviceMemory, Machine, Platform

from opgraft_toy_npu.device import probe

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class ToyNpuPlatform(Platform):
    """One simulated device. The platform of a real device has a ``device_type`` of its own."""

    name = "toy_npu"
    device_type = "cpu"
    # forward_oot comes first on every platform. A device that runs kernels written for CUDA
    # says ("cuda",) here.
    dispatch_chain = ("native",)
    # Tensors lie in the host's memory, but kernels for the CPU would not run on a real device.
    runs_cpu_kernels = False

    def device_count(self) -> int:
        """Return the number of devices."""
        return len(_devices())

    def capability(self, index: int = 0) -> DeviceCapability:
        """Return the device's name, its dtypes and its features."""
        device = _devices()[index]
        return DeviceCapability(device.name, DTYPES, features=("t1",))

    def memory(self, index: int = 0) -> DeviceMemory:
        """Return the device's memory in bytes. All of the memory counts as free."""
        device = _devices()[index]
        total = device.memory or 0
        return DeviceMemory(total=total, free=total)

    def synchronize(self, index: int = 0) -> None:
        """Do nothing: the simulated device has no queue."""

    def manual_seed(self, seed: int) -> None:
        """Seed the random numbers of the device."""
        torch.manual_seed(seed)


def _devices() -> tuple[Device, ...]:
    # A real platform asks its driver instead of the probe.
    return tuple(probe(Machine()).devices)
