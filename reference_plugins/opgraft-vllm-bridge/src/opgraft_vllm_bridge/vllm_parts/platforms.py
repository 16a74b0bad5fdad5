"""The base of a plugin's platform class: ``vllm.platforms.interface``.

The class has the members that opgraft calls or answers. The platform of the process is in
``current.py``.
"""

from __future__ import annotations

import enum
import platform as python
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch


class PlatformEnum(enum.Enum):
    """vLLM's kinds of platforms. Most plugins are ``OOT``, out of tree."""

    CUDA = enum.auto()
    ROCM = enum.auto()
    TPU = enum.auto()
    XPU = enum.auto()
    CPU = enum.auto()
    OOT = enum.auto()
    UNSPECIFIED = enum.auto()


class CpuArchEnum(enum.Enum):
    """Architectures of processors."""

    X86 = enum.auto()
    ARM = enum.auto()
    POWERPC = enum.auto()
    S390X = enum.auto()
    RISCV = enum.auto()
    OTHER = enum.auto()
    UNKNOWN = enum.auto()


_ARCHITECTURES = {
    **dict.fromkeys(("x86_64", "amd64", "i386", "i686"), CpuArchEnum.X86),
    **dict.fromkeys(("arm", "arm64", "aarch64"), CpuArchEnum.ARM),
    **dict.fromkeys(("ppc64", "ppc64le"), CpuArchEnum.POWERPC),
    "s390x": CpuArchEnum.S390X,
    "riscv64": CpuArchEnum.RISCV,
    "": CpuArchEnum.UNKNOWN,
}


class DeviceCapability(NamedTuple):
    """The compute level of a GPU, such as 9.0."""

    major: int
    minor: int

    def as_version_str(self) -> str:
        return f"{self.major}.{self.minor}"

    def to_int(self) -> int:
        return self.major * 10 + self.minor


class Platform:
    """The base of platform classes. A plugin defines the methods that raise here."""

    _enum: PlatformEnum
    device_name: str
    device_type: str
    dispatch_key: str = "CPU"
    ray_device_key: str = ""
    device_control_env_var: str = ""
    simple_compile_backend: str = "inductor"
    dist_backend: str = ""
    supported_quantization: Sequence[str] = ()
    additional_env_vars: Sequence[str] = ()

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    def is_cuda(self) -> bool:
        return self._enum is PlatformEnum.CUDA

    def is_rocm(self) -> bool:
        return self._enum is PlatformEnum.ROCM

    def is_tpu(self) -> bool:
        return self._enum is PlatformEnum.TPU

    def is_xpu(self) -> bool:
        return self._enum is PlatformEnum.XPU

    def is_cpu(self) -> bool:
        return self._enum is PlatformEnum.CPU

    def is_out_of_tree(self) -> bool:
        return self._enum is PlatformEnum.OOT

    def is_unspecified(self) -> bool:
        return self._enum is PlatformEnum.UNSPECIFIED

    def is_cuda_alike(self) -> bool:
        return self._enum in (PlatformEnum.CUDA, PlatformEnum.ROCM)

    @classmethod
    def import_kernels(cls) -> None:
        """Import modules that register kernels with torch. Called when the platform is chosen."""

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        """Register names that settings may contain. Called next, without a parser."""

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: Any) -> None:
        """Change settings. Called next."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Check and change settings. Called last. Settings of the user come before the changes."""

    @classmethod
    def get_compile_backend(cls) -> str:
        return cls.simple_compile_backend

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        raise NotImplementedError

    @classmethod
    def get_device_uuid(cls, device_id: int = 0) -> str:
        raise NotImplementedError

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        raise NotImplementedError

    @classmethod
    def get_current_memory_usage(cls, device: torch.types.Device | None = None) -> float:
        """Return the bytes of a device that are in use."""
        raise NotImplementedError

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability | None:
        return None

    @classmethod
    def has_device_capability(cls, capability: tuple[int, int] | int, device_id: int = 0) -> bool:
        """Return True if a device has this level or a higher one, such as ``(9, 0)`` or 90."""
        own = cls.get_device_capability(device_id=device_id)
        return own is not None and own.to_int() >= _as_int(capability)

    @classmethod
    def is_device_capability(cls, capability: tuple[int, int] | int, device_id: int = 0) -> bool:
        """Return True if a device has exactly this level, such as ``(9, 0)`` or 90."""
        own = cls.get_device_capability(device_id=device_id)
        return own is not None and own.to_int() == _as_int(capability)

    @classmethod
    def is_device_capability_family(cls, capability: int, device_id: int = 0) -> bool:
        """Return True if a device has a level with the same major number."""
        own = cls.get_device_capability(device_id=device_id)
        return own is not None and own.major == capability // 10

    @classmethod
    def inference_mode(cls) -> AbstractContextManager[Any]:
        return torch.inference_mode(mode=True)

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        raise NotImplementedError

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        torch.manual_seed(seed)

    @classmethod
    def get_cpu_architecture(cls) -> CpuArchEnum:
        return _ARCHITECTURES.get(python.machine().lower(), CpuArchEnum.OTHER)

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return torch.accelerator.is_available()

    @classmethod
    def supports_fp8(cls) -> bool:
        return False

    @classmethod
    def is_fp8_fnuz(cls) -> bool:
        return False

    @classmethod
    def fp8_dtype(cls) -> torch.dtype:
        return torch.float8_e4m3fn


class UnspecifiedPlatform(Platform):
    """A platform without a kind. Some plugins derive theirs from it."""

    _enum = PlatformEnum.UNSPECIFIED
    device_type = ""


def _as_int(capability: tuple[int, int] | int) -> int:
    if isinstance(capability, int):
        return capability
    return DeviceCapability(*capability).to_int()
