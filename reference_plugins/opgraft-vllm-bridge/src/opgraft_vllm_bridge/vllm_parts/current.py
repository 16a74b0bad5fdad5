"""``vllm.platforms.current_platform``."""

from __future__ import annotations

import functools
from typing import Any

import opgraft
import torch
from opgraft import Platform as OpgraftPlatform

from opgraft_vllm_bridge.adapting import BridgedPlatform, platform_in_loading
from opgraft_vllm_bridge.vllm_parts.platforms import Platform, PlatformEnum

_KINDS = {each.name.lower(): each for each in PlatformEnum}


class CurrentPlatform:
    """The platform of this process, looked up for each attribute.

    Plugins import this object before the platform is decided.
    """

    def __getattr__(self, name: str) -> Any:
        platform = platform_in_loading() or _of(opgraft.current_platform())
        return getattr(platform, name)


@functools.cache
def _of(ours: OpgraftPlatform) -> Platform:
    if isinstance(ours, BridgedPlatform):
        return ours.theirs
    return _OtherPlatform(ours)


class _OtherPlatform(Platform):
    """A platform of opgraft in vLLM's terms, for plugins without a platform of their own."""

    def __init__(self, ours: OpgraftPlatform) -> None:
        self.ours = ours
        self._enum = _KINDS.get(ours.name, PlatformEnum.OOT)
        self.device_name = ours.name
        self.device_type = ours.device_type
        self.dist_backend = ours.distributed_backend
        self.simple_compile_backend = ours.compile_backend
        self.device_control_env_var = ours.visibility_variable or ""
        self.ray_device_key = ours.ray_device_key or ""

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        return list(self.ours.capability().dtypes)

    # vLLM's methods are of the class, and these are of the instance.
    def get_device_name(self, device_id: int = 0) -> str:  # type: ignore[override]
        return self.ours.capability(device_id).name

    def get_device_total_memory(self, device_id: int = 0) -> int:  # type: ignore[override]
        return self.ours.memory(device_id).total

    def supports_fp8(self) -> bool:  # type: ignore[override]
        return self.ours.capability().fp8_dtype is not None

    def manual_seed_all(self, seed: int) -> None:  # type: ignore[override]
        self.ours.manual_seed(seed)


current_platform = CurrentPlatform()


def is_pin_memory_available() -> bool:
    """Return True if the host's memory can be pinned for copies to the device."""
    return bool(current_platform.is_pin_memory_available())
