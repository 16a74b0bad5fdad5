"""A platform class of a vLLM plugin as a platform class of opgraft."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from opgraft import DeviceCapability, DeviceMemory, OpgraftConfig, Platform, init_logger
from opgraft.plugins.bridges import (
    Offer,
    built_in_platform,
    classes_replaced_by,
    current_config,
    origin_of,
    report_fault,
    shortened,
)

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
"""Kind of platform, as the plugin declares it → dispatch chain. Other kinds run native kernels."""

_CUSTOM_OPS = "compilation_config.custom_ops"


class BridgedPlatform(Platform):
    """The base of platform classes for devices of vLLM plugins.

    Attributes:
        offer: the entry point of the platform.
        vllm_class: the plugin's platform class.
        theirs: the one instance of that class.
    """

    offer: Offer
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
        name = self.theirs.get_device_name(index)
        dtypes = tuple(self.theirs.supported_dtypes)
        fp8 = self.theirs.fp8_dtype() if self.theirs.supports_fp8() else None
        return DeviceCapability(name, dtypes, fp8, self._features(index))

    def _features(self, index: int) -> tuple[str, ...]:
        if self.theirs.is_cpu():
            return built_in_platform("cpu").capability().features
        if not self.theirs.is_cuda_alike():
            return ()
        level = self.theirs.get_device_capability(index)
        return () if level is None else (f"sm_{level.to_int()}",)

    def memory(self, index: int = 0) -> DeviceMemory:
        """Return the memory of a device. If the plugin reports no use, all memory is free."""
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
        """Return the settings that the plugin changes, as far as opgraft has them.

        The plugin is given the settings of this process, and the model in them. Before, it may
        import its kernels and register names that settings contain, as in vLLM.
        """
        with loading(type(self)):
            self.theirs.import_kernels()
            self.theirs.pre_register_and_update(None)
            before, settings = self._changed_settings()
        after = config.values_of(settings)
        changed = {}
        for name, value in after.items():
            # A section that a plugin has replaced may have fields of its own.
            if name not in before or before[name] != value:
                changed[name] = value
        # opgraft adds the user's entries, in a layer above the plugin's.
        users = before[_CUSTOM_OPS]
        after[_CUSTOM_OPS] = tuple(each for each in after[_CUSTOM_OPS] if each not in users)
        if _CUSTOM_OPS in changed:
            changed[_CUSTOM_OPS] = after[_CUSTOM_OPS]
        self._warn_of_unheeded(changed)
        # A dtype that the plugin assigns holds, even if 'auto' stood for the same dtype.
        for name in config.assigned_in(settings) & after.keys():
            changed[name] = after[name]
        return config.as_opgraft(changed)

    def _warn_of_unheeded(self, changed: dict[str, Any]) -> None:
        """Log each setting of the plugin that has no effect, and the reason."""
        for name, value in changed.items():
            reason = config.unheeded(name) or _outranked(name)
            if reason is not None:
                logger.warning(
                    "plugin %s sets %s to %s, to no effect: %s",
                    self.name,
                    name,
                    shortened(repr(value)),
                    reason,
                )

    def _changed_settings(self) -> tuple[dict[str, Any], config.VllmConfig]:
        """Return the values of the settings before, and the settings that the plugin has changed.

        If no model is named, a plugin that needs a model may raise. Then it is asked again with
        ``model_config=None``, as vLLM may do.
        """
        dtype = self.theirs.supported_dtypes[0]
        settings = config.VllmConfig.of(current_config(), self.device_type, dtype)
        before = config.values_of(settings)
        try:
            self._change(settings)
        except Exception:
            if settings.model_config is None or settings.model_config.model is not None:
                raise
            without = config.VllmConfig.of(current_config(), self.device_type, dtype)
            without.model_config = None
            if not self._takes(without):
                raise
            settings = without
        return before, settings

    def _takes(self, settings: config.VllmConfig) -> bool:
        """Let the plugin change settings, and return False if it raises."""
        try:
            self._change(settings)
        except Exception:
            return False
        return True

    def _change(self, settings: config.VllmConfig) -> None:
        self.theirs.apply_config_platform_defaults(settings)
        self.theirs.check_and_update_config(settings)

    def prepare(self, opgraft_config: OpgraftConfig) -> None:
        """Tell the user if no kernel of the plugin runs."""
        provider = self.offer.provider
        if classes_replaced_by(provider):
            return
        report_fault(
            f"platform {self.name!r} of {provider} registers no op: every op runs opgraft's own "
            f"kernels. 'opgraft-vllm-bridge names {provider.name}' lists the names of vLLM that "
            "it lacks",
            provider,
        )


def _outranked(name: str) -> str | None:
    """Return the reason why a setting of the user comes before a plugin's, or None."""
    ours = config.SETTINGS[name]
    origin = origin_of(ours)
    if origin == "default":
        return None
    return f"{ours} is set by {origin}, which comes first"


_LOADING: list[VllmPlatform] = []
"""The platforms being loaded, the latest last. None of them is chosen yet."""


@contextmanager
def loading(platform: type[BridgedPlatform]) -> Iterator[None]:
    """Within the block, let the plugin's code see this platform as the current one."""
    _LOADING.append(platform.theirs)
    try:
        yield
    finally:
        _LOADING.pop()


def platform_in_loading() -> VllmPlatform | None:
    """Return the platform that is being loaded, or None."""
    return _LOADING[-1] if _LOADING else None


def adapted(offer: Offer, theirs: Any) -> type[BridgedPlatform]:
    """Return a platform class of opgraft for a plugin's class, named as the entry point.

    Raises:
        TypeError: ``theirs`` is no platform class of vLLM.
    """
    if not (isinstance(theirs, type) and issubclass(theirs, VllmPlatform)):
        raise TypeError(f"{theirs!r} is no subclass of vllm.platforms.Platform")
    members = {
        "name": offer.name,
        "offer": offer,
        "vllm_class": theirs,
        "theirs": theirs(),
        "__module__": theirs.__module__,
    }
    return type(theirs.__name__, (BridgedPlatform,), members)
