"""The devices of ``torch_openreg`` as the host sees them."""

from __future__ import annotations

import importlib
import os

import torch
from opgraft import DeviceCapability, DeviceMemory, Platform

from opgraft_openreg import DEVICES, EXAMPLE

# The import names the backend of torch, and adds the module torch.openreg.
importlib.import_module(EXAMPLE)

# The CPU computes, in every dtype that torch has for the CPU.
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class OpenRegPlatform(Platform):
    """Two devices in the host's memory. The CPU runs almost every operator."""

    name = "openreg"
    device_type = "openreg"
    dispatch_chain = ("native",)
    # The example has no compiler.
    compile_backend = "eager"

    def device_count(self) -> int:
        """Return the number of devices."""
        return torch.accelerator.device_count()

    def capability(self, index: int = 0) -> DeviceCapability:
        """Return the capability. All devices are alike."""
        return DeviceCapability(DEVICES[index].name, DTYPES)

    def memory(self, index: int = 0) -> DeviceMemory:
        """Return the memory of the host. The devices have no memory of their own."""
        page = os.sysconf("SC_PAGE_SIZE")
        total = os.sysconf("SC_PHYS_PAGES") * page
        return DeviceMemory(total, os.sysconf("SC_AVPHYS_PAGES") * page)

    def synchronize(self, index: int = 0) -> None:
        """Wait for the queues of a device."""
        torch.accelerator.synchronize(index)

    def manual_seed(self, seed: int) -> None:
        """Seed the devices and the CPU, which draws for them."""
        torch.manual_seed(seed)
