"""The base of platforms that PyTorch serves through ``torch.cuda``: CUDA itself, and ROCm, which goes by its name."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from opgraft.platform import DeviceMemory, Platform


class TorchCudaPlatform(Platform):
    """A GPU of ``torch.cuda``. Only methods that take a device index initialise it, so a process may fork before."""

    @property
    def device_type(self) -> str:
        return "cuda"

    @abstractmethod
    def visible_devices(self) -> int:
        """Count the devices that this process may use, as the probe finds them."""

    def device_count(self) -> int:
        """Count by the probe until ``torch.cuda`` is in use: its own count may start the driver, and end forking."""
        in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch gives it no types
        return torch.cuda.device_count() if in_use else self.visible_devices()

    def memory(self, index: int = 0) -> DeviceMemory:
        free, total = torch.cuda.mem_get_info(index)
        return DeviceMemory(total=total, free=free)

    def synchronize(self, index: int = 0) -> None:
        torch.cuda.synchronize(index)

    def manual_seed(self, seed: int) -> None:
        """Seed the CPU and every GPU; PyTorch seeds a GPU that is not in use yet when it is."""
        torch.manual_seed(seed)

    @property
    def distributed_backend(self) -> str:
        return "nccl"

    @property
    @abstractmethod
    def visibility_variable(self) -> str: ...

    @property
    def ray_device_key(self) -> str:
        return "GPU"

    @property
    def graph_class(self) -> type[Any]:
        return torch.cuda.CUDAGraph

    @property
    def streams(self) -> Any:
        return torch.cuda
