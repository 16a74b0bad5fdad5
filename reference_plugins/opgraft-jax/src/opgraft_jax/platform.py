"""JAX as the host sees it."""

from __future__ import annotations

import os

import torch
from opgraft import DeviceCapability, DeviceMemory, Platform

from opgraft_jax import crossing


class JaxPlatform(Platform):
    """One device of JAX. Tensors stay in the host's memory, and each op hands them to JAX."""

    name = "jax"
    device_type = "cpu"
    # Ops without a program of JAX run on the CPU, where the tensors are.
    dispatch_chain = ("cpu", "native")

    def device_count(self) -> int:
        """Return 1: a process uses the first device of JAX."""
        return 1

    def capability(self, index: int = 0) -> DeviceCapability:
        """Return the name that JAX gives the device, and the dtypes of the ops."""
        return DeviceCapability(crossing.device().device_kind, crossing.DTYPES)

    def memory(self, index: int = 0) -> DeviceMemory:
        """Return the host's memory in bytes, because tensors stay there."""
        page = os.sysconf("SC_PAGE_SIZE")
        total = os.sysconf("SC_PHYS_PAGES") * page
        free = os.sysconf("SC_AVPHYS_PAGES") * page
        return DeviceMemory(total, free)

    def synchronize(self, index: int = 0) -> None:
        """Do nothing: an op returns when JAX has computed the result."""

    def manual_seed(self, seed: int) -> None:
        """Seed torch, because no op of this plugin draws random numbers."""
        torch.manual_seed(seed)
