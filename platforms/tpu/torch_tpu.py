"""torch_tpu: PyTorch's device for out-of-tree backends under the name ``tpu``, reached through ``torch.accelerator``.

Its own ``torch.tpu`` functions of the same names refuse to be called by others from torch 2.11 on.
"""

from __future__ import annotations

import torch
import torch_tpu  # noqa: F401  # registers the device, where torch has not loaded it already
from opgraft.errors import PlatformError
from opgraft.platform import DeviceMemory
from opgraft.platforms.tpu.runtime import Runtime


class TorchTpu(Runtime):
    """The calls of torch_tpu 0.2."""

    def device_count(self) -> int:
        return torch.accelerator.device_count()

    def memory(self, index: int) -> DeviceMemory:
        free, total = torch.accelerator.get_memory_info(index)
        return DeviceMemory(total, free)

    def synchronize(self, index: int) -> None:
        torch.accelerator.synchronize(index)

    def manual_seed(self, seed: int) -> None:
        """Do nothing: ``torch.manual_seed`` seeds registered devices too."""

    def compilations(self) -> int:
        raise PlatformError(
            "torch_tpu has no public count of compilations: count under torch_xla with PJRT_DEVICE=CPU"
        )
