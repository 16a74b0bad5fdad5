"""A plugin's platform class of vLLM as a platform class of opgraft."""

from __future__ import annotations

import torch
from opgraft import DeviceCapability, DeviceMemory, OpgraftConfig, Platform
from opgraft.hosts import built_in_platform, shortened
from opgraft.logger import init_logger

from opgraft_vllm_bridge.vllm_parts import config
from opgraft_vllm_bridge.vllm_parts.platforms import Platform as VllmPlatform
from opgraft_vllm_bridge.vllm_parts.platforms import PlatformEnum

logger = init_logger("opgraft.vllm_bridge")

_CHAINS = {
    PlatformEnum.CUDA: ("cuda", "native"),
    PlatformEnum.ROCM: ("hip", "cuda", "native"),
    PlatformEnum.TPU: ("tpu", "native"),
    PlatformEnum.XPU: ("xpu", "native"),
    PlatformEnum.CPU: ("cpu", "native"),
}
"""The dispatch chains of plugins that say that they are one of the kinds that vLLM itself has kernels for."""


class BridgedPlatform(Platform):
    """A device of a vLLM plugin. Classes that derive from it say which.

    Attributes:
        vllm_class: the plugin's.
        theirs: an instance of it, of which there is one for all.
    """

    vllm_class: type[VllmPlatform]
    theirs: VllmPlatform

    @property
    def device_type(self) -> str:
        return self.theirs.device_type

    @property
    def dispatch_chain(self) -> tuple[str, ...]:
        return _CHAINS.get(self.vllm_class._enum, ("native",))

    def device_count(self) -> int:
        return int(torch.get_device_module(self.device_type).device_count())

    def capability(self, index: int = 0) -> DeviceCapability:
        fp8 = self.theirs.fp8_dtype() if self.theirs.supports_fp8() else None
        features: tuple[str, ...] = ()
        if self.theirs.is_cpu():
            features = built_in_platform("cpu").capability().features
        elif (
            self.theirs.is_cuda_alike()
            and (level := self.theirs.get_device_capability(index)) is not None
        ):
            features = (f"sm_{level.to_int()}",)
        return DeviceCapability(
            self.theirs.get_device_name(index), tuple(self.theirs.supported_dtypes), fp8, features
        )

    def memory(self, index: int = 0) -> DeviceMemory:
        """Return the memory of a device; all of it is free where the plugin does not say what is in use."""
        total = self.theirs.get_device_total_memory(index)
        try:
            used = int(self.theirs.get_current_memory_usage(torch.device(self.device_type, index)))
        except NotImplementedError:
            used = 0
        return DeviceMemory(total, total - used)

    def synchronize(self, index: int = 0) -> None:
        torch.get_device_module(self.device_type).synchronize(index)

    def manual_seed(self, seed: int) -> None:
        self.theirs.manual_seed_all(seed)

    @property
    def distributed_backend(self) -> str:
        return self.theirs.dist_backend or super().distributed_backend

    @property
    def compile_backend(self) -> str:
        return self.theirs.get_compile_backend()

    @property
    def visibility_variable(self) -> str | None:
        return self.theirs.device_control_env_var or None

    @property
    def ray_device_key(self) -> str | None:
        return self.theirs.ray_device_key or None

    def default_config(self) -> OpgraftConfig:
        """Return what the plugin changes of vLLM's settings, as far as they are opgraft's.

        What it does when it is chosen comes before: kernels, and what settings may name.
        """
        self.theirs.import_kernels()
        self.theirs.pre_register_and_update(None)
        settings = config.VllmConfig.of(OpgraftConfig().resolved(), self.device_type)
        before = config.values_of(settings)
        self.theirs.apply_config_platform_defaults(settings)
        self.theirs.check_and_update_config(settings)
        changed = {
            name: value
            for name, value in config.values_of(settings).items()
            if before[name] != value
        }
        for name, value in changed.items():
            why = config.unheeded(name)
            if why is not None:
                logger.warning(
                    "plugin %s sets %s to %s, to no effect: %s",
                    self.name,
                    name,
                    shortened(repr(value)),
                    why,
                )
        return config.as_opgraft(changed)


def adapted(name: str, theirs: type[VllmPlatform]) -> type[BridgedPlatform]:
    """Return the platform class for that of a plugin, under the name of its entry point."""
    if not (isinstance(theirs, type) and issubclass(theirs, VllmPlatform)):
        raise TypeError(f"{theirs!r} is no subclass of vllm.platforms.Platform")
    members = {
        "name": name,
        "vllm_class": theirs,
        "theirs": theirs(),
        "__module__": theirs.__module__,
    }
    return type(theirs.__name__, (BridgedPlatform,), members)
