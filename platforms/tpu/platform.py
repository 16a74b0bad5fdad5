"""TPUs in PyTorch, through the one of two packages for the installed torch."""

from __future__ import annotations

import importlib

import torch
from opgraft.config import OpgraftConfig
from opgraft.errors import PlatformError
from opgraft.machine.machine import Machine
from opgraft.platform import DeviceCapability, DeviceMemory, Platform
from opgraft.platforms.tpu.packages import RuntimePackage, choose
from opgraft.platforms.tpu.probe import VISIBILITY_VARIABLES, probe
from opgraft.platforms.tpu.runtime import Runtime, RuntimeOwner


class TpuPlatform(Platform, RuntimeOwner):
    """TPU chips, or XLA's CPU client with ``PJRT_DEVICE=CPU``.

    Raises:
        PlatformError: no package with a TPU device fits the installed torch.
    """

    def __init__(self) -> None:
        choice = choose(Machine())
        if choice.package is None:
            facts = "; ".join(f"{fact.source}: {fact.value}" for fact in choice.facts)
            raise PlatformError(
                f"no package for TPUs fits {choice.torch} ({facts}): {choice.remedy}"
            )
        self.package: RuntimePackage = choice.package
        module, _, name = self.package.runtime.partition(":")
        self.runtime: Runtime = getattr(importlib.import_module(module), name)()

    @property
    def name(self) -> str:
        return "tpu"

    @property
    def device_type(self) -> str:
        return self.package.device_type

    @property
    def runs_cpu_kernels(self) -> bool:
        # The default would ask a runtime package for the device type.
        return False

    @property
    def dispatch_chain(self) -> tuple[str, ...]:
        return ("tpu",)

    def device_count(self) -> int:
        return self.runtime.device_count()

    def capability(self, index: int = 0) -> DeviceCapability:
        """Return name and generation from the probe."""
        # The matrix units multiply bfloat16, and float32 in several passes.
        dtypes = (torch.bfloat16, torch.float32)
        if self.runtime.on_cpu():
            return DeviceCapability("XLA on the CPU", (*dtypes, torch.float64, torch.float16))
        chips = probe(Machine()).devices
        if not chips:
            return DeviceCapability("Google TPU", dtypes)
        # All chips of a host are alike. In some generations a chip is two devices.
        chip = chips[min(index, len(chips) - 1)]
        features = (chip.capability,) if chip.capability else ()
        return DeviceCapability(chip.name, dtypes, features=features)

    def memory(self, index: int = 0) -> DeviceMemory:
        return self.runtime.memory(index)

    def synchronize(self, index: int = 0) -> None:
        self.runtime.synchronize(index)

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.runtime.manual_seed(seed)

    def compilations(self) -> int:
        """Return the number of programs that XLA has compiled in this process.

        ``opgraft.models.bucketing.no_recompilation`` compares two counts.

        Raises:
            PlatformError: the package has no public counter.
        """
        return self.runtime.compilations()

    @property
    def distributed_backend(self) -> str:
        return self.package.distributed_backend

    @property
    def compile_backend(self) -> str:
        return self.package.compile_backend

    def prepare(self, config: OpgraftConfig) -> None:
        """Have engines construct the model runner, the worker and the attention for TPUs."""
        importlib.import_module("opgraft.platforms.tpu.engine").register()

    @property
    def ray_device_key(self) -> str:
        return "TPU"

    @property
    def visibility_variable(self) -> str:
        return VISIBILITY_VARIABLES[0]
