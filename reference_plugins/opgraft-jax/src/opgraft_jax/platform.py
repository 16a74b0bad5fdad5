"""JAX as the host sees it."""

from __future__ import annotations

import os

import torch
from opgraft import DeviceCapability, DeviceMemory, Platform

from opgraft_jax import crossing


class JaxPlatform(Platform):
    """One device of JAX. Tensors are torch's, in the memory of the host; ops take them over and bring results back."""

    name = "jax"
    device_type = "cpu"
    # What JAX does not compute, torch does where the tensors are.
    dispatch_chain = (
        "cpu",
        "native",
    )

    def device_count(self) -> int:
        return 1

    def capability(self, index: int = 0) -> DeviceCapability:
        return DeviceCapability(crossing.device().device_kind, crossing.DTYPES)

    def memory(self, index: int = 0) -> DeviceMemory:
        """Tell the memory of the host, as tensors stay there."""
        page = os.sysconf("SC_PAGE_SIZE")
        return DeviceMemory(
            os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page
        )

    def synchronize(self, index: int = 0) -> None:
        """Do nothing: an op returns when JAX has computed it."""

    def manual_seed(self, seed: int) -> None:
        """Seed torch: no op here draws random numbers."""
        torch.manual_seed(seed)
