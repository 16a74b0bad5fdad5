"""The host as a platform: ``vllm.platforms.cpu``.

Plugins derive from it if their tensors lie in the host's memory.
"""

from __future__ import annotations

from typing import Any

from opgraft.plugins.bridges import built_in_platform

from opgraft_vllm_bridge.vllm_parts.platforms import Platform, PlatformEnum


class CpuPlatform(Platform):
    """The processors of the host."""

    _enum = PlatformEnum.CPU
    device_name = "cpu"
    device_type = "cpu"
    dist_backend = "gloo"

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return built_in_platform("cpu").capability().name

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return built_in_platform("cpu").memory().total

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Run one worker in this process, and several in processes of their own."""
        parallel = vllm_config.parallel_config
        if parallel.distributed_executor_backend is None:
            parallel.distributed_executor_backend = "uni" if parallel.world_size == 1 else "mp"

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False
