"""Intel GPUs as PyTorch sees them."""

from __future__ import annotations

from typing import Any

import torch
from opgraft.platform import DeviceCapability, DeviceMemory, Platform
from opgraft.platforms.xpu.probe import MASK


class XpuPlatform(Platform):
    """Discrete Intel GPUs through ``torch.xpu``; a tile of a data-centre GPU is a device of its own."""

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
        """List float64 and float16 only where the driver names them: Arc has no float64. No unit computes in fp8."""
        properties = torch.xpu.get_device_properties(index)
        dtypes = [torch.float32, torch.bfloat16]
        dtypes += [torch.float16] if properties.has_fp16 else []
        dtypes += [torch.float64] if properties.has_fp64 else []
        features = ("dpas",) if properties.has_subgroup_matrix_multiply_accumulate else ()
        whole = torch.float64 in dtypes
        name = properties.name
        return DeviceCapability(name, tuple(dtypes), features=features, computes_float64=whole)

    def memory(self, index: int = 0) -> DeviceMemory:
        free, total = torch.xpu.mem_get_info(index)
        return DeviceMemory(total=total, free=free)

    def synchronize(self, index: int = 0) -> None:
        torch.xpu.synchronize(index)

    def manual_seed(self, seed: int) -> None:
        # Which seeds all XPUs too, or lets them be seeded when they are first used.
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
        """``torch.xpu.XPUGraph``, which torch has from 2.11 on."""
        return vars(torch.xpu).get("XPUGraph")

    @property
    def streams(self) -> Any:
        return torch.xpu
