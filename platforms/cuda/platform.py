"""NVIDIA GPUs as PyTorch sees them."""

from __future__ import annotations

import torch
from opgraft.machine.machine import Machine
from opgraft.platform import DeviceCapability
from opgraft.platforms.cuda.probe import VARIABLE, probe, visible_count
from opgraft.platforms.torch_cuda import TorchCudaPlatform


class CudaPlatform(TorchCudaPlatform):
    """The NVIDIA GPUs that this process sees."""

    @property
    def name(self) -> str:
        return "cuda"

    @property
    def dispatch_chain(self) -> tuple[str, ...]:
        return ("cuda",)

    def visible_devices(self) -> int:
        return visible_count(probe(Machine()))

    def capability(self, index: int = 0) -> DeviceCapability:
        """Return bfloat16 from compute capability 8.0 on, for arithmetic, and fp8 from 8.9 on."""
        level = torch.cuda.get_device_capability(index)
        major, minor = level
        dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64, torch.float16)
        if level >= (8, 0):
            dtypes = (*dtypes, torch.bfloat16)
        return DeviceCapability(
            name=torch.cuda.get_device_name(index),
            dtypes=dtypes,
            fp8_dtype=torch.float8_e4m3fn if level >= (8, 9) else None,
            features=(f"sm_{major}{minor}",),
        )

    @property
    def visibility_variable(self) -> str:
        return VARIABLE
