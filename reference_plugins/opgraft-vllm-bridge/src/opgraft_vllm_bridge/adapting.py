"""A plugin's platform class of vLLM as a platform class of opgraft."""

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
"""The dispatch chains of plugins that say that they are one of the kinds that vLLM itself has kernels for."""


_CUSTOM_OPS = "compilation_config.custom_ops"


class BridgedPlatform(Platform):
    """A device of a vLLM plugin. Classes that derive from it say which.

    Attributes:
        offer: the entry point of the platform.
        vllm_class: the plugin's.
        theirs: an instance of it, of which there is one for all.
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

        What it does when it is chosen comes before: kernels, and what settings may name. It is
        given the settings of this process and the model that they name.
        """
        with loading(type(self)):
            self.theirs.import_kernels()
            self.theirs.pre_register_and_update(None)
            before, settings = self._changed_settings()
        after = config.values_of(settings)
        # A section that a plugin has replaced may have fields of its own.
        changed = {n: value for n, value in after.items() if n not in before or before[n] != value}
        # Those of the user are in a layer of their own, which comes first.
        former = before[_CUSTOM_OPS]
        after[_CUSTOM_OPS] = tuple(each for each in after[_CUSTOM_OPS] if each not in former)
        if _CUSTOM_OPS in changed:
            changed[_CUSTOM_OPS] = after[_CUSTOM_OPS]
        for name, value in changed.items():
            why = config.unheeded(name) or _outranked(name)
            if why is not None:
                logger.warning(
                    "plugin %s sets %s to %s, to no effect: %s",
                    self.name,
                    name,
                    shortened(repr(value)),
                    why,
                )
        # A dtype that the plugin assigns holds, although 'auto' stood for the same one.
        assigned = config.assigned_in(settings)
        return config.as_opgraft(changed | {name: after[name] for name in assigned & after.keys()})

    def _changed_settings(self) -> tuple[dict[str, Any], config.VllmConfig]:
        """Return the values of settings before, and the settings that the plugin has changed.

        If no model is named, a plugin that needs one is asked again with ``model_config=None``,
        which vLLM allows.
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
        if not classes_replaced_by(provider):
            report_fault(
                f"platform {self.name!r} of {provider} registers no op: every op runs opgraft's own kernels. "
                f"'opgraft-vllm-bridge names {provider.name}' lists the names of vLLM that it lacks",
                provider,
            )


def _outranked(name: str) -> str | None:
    """Say which setting of the user stands above that of a plugin; ``None`` if there is none."""
    ours = config.SETTINGS[name]
    origin = origin_of(ours)
    return None if origin == "default" else f"{ours} is set by {origin}, which comes first"


_LOADING: list[VllmPlatform] = []
"""The platform whose op modules are imported or whose settings are asked, which is not chosen yet."""


@contextmanager
def loading(platform: type[BridgedPlatform]) -> Iterator[None]:
    """Let code of the plugin that runs within the block see a platform as the current one."""
    _LOADING.append(platform.theirs)
    try:
        yield
    finally:
        _LOADING.pop()


def platform_in_loading() -> VllmPlatform | None:
    """Return the platform that is being loaded right now, if any."""
    return _LOADING[-1] if _LOADING else None


def adapted(offer: Offer, theirs: Any) -> type[BridgedPlatform]:
    """Return the platform class for that of a plugin, under the name of its entry point."""
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
