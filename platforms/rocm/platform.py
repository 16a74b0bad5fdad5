"""AMD GPUs in PyTorch: the device type and the functions of ``torch.cuda``."""

from __future__ import annotations

import torch
from opgraft.machine.machine import Machine
from opgraft.platform import DeviceCapability
from opgraft.platforms.rocm.probe import UPPER_VARIABLES, probe, visible_count
from opgraft.platforms.torch_cuda import TorchCudaPlatform

FP8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}
"""Target → fp8 format. The format of gfx942 has no negative zero."""


class RocmPlatform(TorchCudaPlatform):
    """The AMD GPUs that this process sees."""

    @property
    def name(self) -> str:
        return "rocm"

    @property
    def dispatch_chain(self) -> tuple[str, ...]:
        return ("hip", "cuda")

    def visible_devices(self) -> int:
        return visible_count(probe(Machine()))

    def capability(self, index: int = 0) -> DeviceCapability:
        # Such as gfx942:sramecc+:xnack-.
        target, *switches = torch.cuda.get_device_properties(index).gcnArchName.split(":")
        return DeviceCapability(
            name=torch.cuda.get_device_name(index),
            dtypes=(torch.float32, torch.float64, torch.float16, torch.bfloat16),
            fp8_dtype=FP8.get(target),
            features=(target, *switches),
        )

    @property
    def visibility_variable(self) -> str:
        return UPPER_VARIABLES[0]
