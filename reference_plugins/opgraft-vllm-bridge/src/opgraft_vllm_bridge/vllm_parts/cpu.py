"""``vllm.platforms.cpu``: the host, from which plugins derive whose tensors lie in its memory."""

from __future__ import annotations

from opgraft.machine.host_memory import host_memory
from opgraft.platforms.cpu.platform import CpuPlatform as _CpuPlatform

from opgraft_vllm_bridge.vllm_parts.platforms import Platform, PlatformEnum


class CpuPlatform(Platform):
    """The processors of the host."""

    _enum = PlatformEnum.CPU
    device_name = "cpu"
    device_type = "cpu"
    dist_backend = "gloo"

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return _CpuPlatform().capability().name

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return host_memory()[0]

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False
