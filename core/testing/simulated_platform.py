"""The platform of a simulated accelerator."""

from __future__ import annotations

from typing import Any

import torch
from opgraft.compat.python_device import register_device, why_not
from opgraft.config import CompilationConfig, OpgraftConfig, SchedulerConfig
from opgraft.errors import PlatformError
from opgraft.machine.machine import Machine
from opgraft.platform import DeviceCapability, DeviceMemory, Platform
from opgraft.testing import simulated_graphs, simulated_streams, simulated_tensors
from opgraft.testing.devices import DEVICE_TYPE, SimulatedDevice, simulated_device


class SimulatedPlatform(Platform):
    """One simulated device; torch knows the device by a type of its own.

    Raises:
        PlatformError: this torch cannot have devices written in Python.
    """

    def __init__(self) -> None:
        reason = why_not()
        if reason:
            raise PlatformError(f"a simulated device cannot be made: {reason}")
        self.device = simulated_device(Machine()) or SimulatedDevice()
        register_device(DEVICE_TYPE, simulated_tensors.compute)
        module: Any = torch.get_device_module(DEVICE_TYPE)
        module.graph = simulated_graphs.graph
        simulated_tensors.begin(self.device)

    @property
    def name(self) -> str:
        return DEVICE_TYPE

    @property
    def device_type(self) -> str:
        return DEVICE_TYPE

    @property
    def dispatch_chain(self) -> tuple[str, ...]:
        return ("native",)

    @property
    def compile_backend(self) -> str:
        return "eager"

    def device_count(self) -> int:
        return 1

    def capability(self, index: int = 0) -> DeviceCapability:
        dtypes = tuple(getattr(torch, name) for name in self.device.dtypes)
        return DeviceCapability(
            self.device.name,
            dtypes,
            features=self.device.features,
            computes_float64=torch.float64 in dtypes,
        )

    def memory(self, index: int = 0) -> DeviceMemory:
        total = self.device.memory
        free = total - simulated_tensors.bytes_in_use()
        return DeviceMemory(total, free)

    def synchronize(self, index: int = 0) -> None:
        simulated_streams.synchronize()

    @property
    def graph_class(self) -> type[Any]:
        return simulated_graphs.Graph

    @property
    def streams(self) -> Any:
        return simulated_streams

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def default_config(self) -> OpgraftConfig:
        """Return smaller steps, and a backend that generates no code for the device."""
        # An engine tries the largest step, and Python starts each operator.
        limits = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512)
        compilation = CompilationConfig(backend=self.compile_backend)
        return OpgraftConfig(scheduler=limits, compilation_config=compilation)
