"""torch_tpu: an out-of-tree backend of PyTorch with the name ``tpu``.

The calls go through ``torch.accelerator``. From torch 2.11 on, the functions of ``torch.tpu``
refuse foreign callers.
"""

from __future__ import annotations

import torch

# Registers the device, if torch has not loaded the package already.
import torch_tpu  # noqa: F401
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
        """Do nothing: ``torch.manual_seed`` has seeded all registered devices."""

    def compilations(self) -> int:
        raise PlatformError(
            "torch_tpu has no public count of compilations: count under torch_xla with "
            "PJRT_DEVICE=CPU"
        )
