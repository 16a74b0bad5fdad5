"""Intel GPUs as PyTorch sees them."""

from __future__ import annotations

from typing import Any

import torch
from opgraft.platform import DeviceCapability, DeviceMemory, Platform
from opgraft.platforms.xpu.probe import MASK


class XpuPlatform(Platform):
    """Discrete Intel GPUs through ``torch.xpu``. Each tile of a data-centre GPU is a device."""

    @property
    def name(self) -> str:
        return "xpu"

    @property
    def device_type(self) -> str:
        return "xpu"

    @property
    def dispatch_chain(self) -> tuple[str, ...]:
        return ("xpu",)

    def device_count(self) -> int:
        return torch.xpu.device_count()

    def capability(self, index: int = 0) -> DeviceCapability:
        """Return float64 and float16 if the driver names them. No unit computes in fp8."""
        properties = torch.xpu.get_device_properties(index)
        dtypes = [torch.float32, torch.bfloat16]
        if properties.has_fp16:
            dtypes.append(torch.float16)
        # Arc has no float64.
        if properties.has_fp64:
            dtypes.append(torch.float64)
        return DeviceCapability(
            properties.name,
            tuple(dtypes),
            features=("dpas",) if properties.has_subgroup_matrix_multiply_accumulate else (),
            computes_float64=torch.float64 in dtypes,
        )

    def memory(self, index: int = 0) -> DeviceMemory:
        free, total = torch.xpu.mem_get_info(index)
        return DeviceMemory(total=total, free=free)

    def synchronize(self, index: int = 0) -> None:
        torch.xpu.synchronize(index)

    def manual_seed(self, seed: int) -> None:
        # PyTorch seeds all XPUs too, an idle one at the first use.
        torch.manual_seed(seed)

    @property
    def distributed_backend(self) -> str:
        return "xccl"

    @property
    def ray_device_key(self) -> str:
        return "GPU"

    @property
    def visibility_variable(self) -> str:
        return MASK

    @property
    def graph_class(self) -> type[Any] | None:
        """``torch.xpu.XPUGraph``, from torch 2.11 on."""
        return vars(torch.xpu).get("XPUGraph")

    @property
    def streams(self) -> Any:
        return torch.xpu
