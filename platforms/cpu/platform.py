"""The CPU as PyTorch sees it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property

import torch
from opgraft.config import OpgraftConfig
from opgraft.machine.host_memory import host_memory
from opgraft.machine.machine import Machine
from opgraft.platform import DeviceCapability, DeviceMemory, Platform
from opgraft.platforms.cpu.allocator import keep_memory_or_warn
from opgraft.platforms.cpu.packages import KERNEL_PACKAGES
from opgraft.platforms.cpu.probe import probe


class CpuPlatform(Platform):
    """All cores of the host as one device."""

    @property
    def name(self) -> str:
        return "cpu"

    @property
    def device_type(self) -> str:
        return "cpu"

    @property
    def dispatch_chain(self) -> tuple[str, ...]:
        return ("cpu",)

    @property
    def kernel_packages(self) -> Mapping[str, Collection[str]]:
        return KERNEL_PACKAGES

    def prepare(self, config: OpgraftConfig) -> None:
        if config.cpu_keep_memory:
            keep_memory_or_warn()

    def device_count(self) -> int:
        return 1

    def capability(self, index: int = 0) -> DeviceCapability:
        return self._capability

    @cached_property
    def _capability(self) -> DeviceCapability:
        # Cached, because each kernel and shape asks and the file does not change.
        devices = probe(Machine()).devices
        name = devices[0].name if devices else "CPU"
        words = (devices[0].capability or "") if devices else ""
        features = tuple(words.split())
        dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        return DeviceCapability(name, dtypes, torch.float8_e4m3fn, features)

    def memory(self, index: int = 0) -> DeviceMemory:
        return DeviceMemory(*host_memory())

    def synchronize(self, index: int = 0) -> None:
        """Do nothing: PyTorch's CPU kernels return when they are done."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)
