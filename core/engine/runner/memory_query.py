"""``MemoryQuery``: the memory of a worker's device."""

from __future__ import annotations

import torch
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.machine.host_memory import host_memory
from opgraft.platform import HOST, effective_chain
from opgraft.plugins.selection import current_platform


@PluggableClass.register("memory_query")
class MemoryQuery(PluggableClass):
    """Returns the free memory, for the size of a worker's cache. Asks the platform, or the host.

    Args:
        device: of the worker.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def is_of_host(self) -> bool:
        """Return True if the memory is the host's, shared with all other processes."""
        if self.device.type != HOST:
            return False
        platform = current_platform()
        # A plugin may bring a platform of the device type "cpu" with memory of its own.
        return platform.device_type != HOST or HOST in effective_chain(platform)

    def free(self) -> int | None:
        """Return the free bytes; ``None`` if unknown, as for a device of another platform."""
        platform = current_platform()
        if self.device.type == platform.device_type:
            return platform.memory(self.device.index or 0).free
        if not self.is_of_host:
            return None
        _, free = host_memory()
        return free
