"""The base of platforms below ``torch.cuda``: CUDA and ROCm."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from opgraft.platform import DeviceMemory, Platform


class TorchCudaPlatform(Platform):
    """A GPU of ``torch.cuda``. A process may fork before the first method with a device index."""

    @property
    def device_type(self) -> str:
        return "cuda"

    @abstractmethod
    def visible_devices(self) -> int:
        """Return the number of devices for this process, as the probe finds them."""

    def device_count(self) -> int:
        """Return the number of devices. Ask the probe until ``torch.cuda`` is in use."""
        # torch.cuda may start the driver to count, and the process could fork no more.
        in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return torch.cuda.device_count() if in_use else self.visible_devices()

    def memory(self, index: int = 0) -> DeviceMemory:
        free, total = torch.cuda.mem_get_info(index)
        return DeviceMemory(total=total, free=free)

    def synchronize(self, index: int = 0) -> None:
        torch.cuda.synchronize(index)

    def manual_seed(self, seed: int) -> None:
        """Seed the CPU and every GPU. PyTorch seeds an idle GPU at the first use."""
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
