"""The device as the host sees it."""

from __future__ import annotations

import torch
from opgraft import DeviceCapability, DeviceMemory, Machine, Platform

from opgraft_toy_npu.device import probe


class ToyNpuPlatform(Platform):
    """One simulated device. A real one returns its own ``device_type`` and asks its driver, not a probe."""

    name = "toy_npu"
    device_type = "cpu"
    # forward_oot comes first on every platform. A CUDA-alike would say ("cuda",) to reuse kernels written for CUDA.
    dispatch_chain = ("native",)
    runs_cpu_kernels = False  # it only stands for a device in the memory of the host

    def device_count(self) -> int:
        return len(probe(Machine()).devices)

    def capability(self, index: int = 0) -> DeviceCapability:
        dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        return DeviceCapability(probe(Machine()).devices[index].name, dtypes, features=("t1",))

    def memory(self, index: int = 0) -> DeviceMemory:
        total = probe(Machine()).devices[index].memory or 0
        return DeviceMemory(total=total, free=total)

    def synchronize(self, index: int = 0) -> None:
        """Do nothing: the simulated device has no queue."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)
