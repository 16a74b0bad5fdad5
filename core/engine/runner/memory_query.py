"""``MemoryQuery``: the memory of a worker's device."""

from __future__ import annotations

import torch
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.machine.host_memory import host_memory
from opgraft.platform import HOST, effective_chain
from opgraft.plugins.selection import current_platform


@PluggableClass.register("memory_query")
class MemoryQuery(PluggableClass):
    """Tells how much memory is free, by which a worker sizes its cache. This one asks the platform, or the host.

    Args:
        device: of the worker.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def is_of_host(self) -> bool:
        """Tell whether the memory is that of the host, which is everybody's."""
        platform = current_platform()
        return self.device.type == HOST and (
            platform.device_type != HOST or HOST in effective_chain(platform)
        )

    def free(self) -> int | None:
        """Return the bytes that are free; ``None`` where that is not known, as for a device of another platform."""
        platform = current_platform()
        if self.device.type == platform.device_type:
            return platform.memory(self.device.index or 0).free
        return host_memory()[1] if self.is_of_host else None
