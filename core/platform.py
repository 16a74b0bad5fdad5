"""The contract between opgraft and a device: ``PlatformSpec`` to be found by, ``Platform`` to be used by."""

from __future__ import annotations

import functools
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from opgraft.config import OpgraftConfig
from opgraft.errors import PlatformError
from opgraft.machine.evidence import Evidence, Sighting
from opgraft.machine.host_cpu import CPUINFO, features_of
from opgraft.machine.machine import Machine

if TYPE_CHECKING:
    import torch

DISPATCH_KEYS = ("oot", "cpu", "cuda", "hip", "xpu", "tpu", "native")
"""Every dispatch key; the kernel for ``key`` is the method ``forward_<key>`` of an op class."""

HOST = "cpu"
"""The ``torch.device`` type of tensors in the memory of the host; of the dispatch keys, that of its processors."""


@dataclass(frozen=True)
class PlatformSpec:
    """The target of an entry point of the group ``opgraft.platforms``; its module must not import torch.

    Attributes:
        probe: tells from a machine's files and environment whether the platform can be used there. Never raises.
        platform_class: dotted path ``package.module:Class`` of the ``Platform``, or a function that returns the class;
            imported, or called, once it is selected.
        priority: among built-in platforms the highest available one wins.
        sightings: of a built-in platform, recognises hardware that is another platform's and may have no plugin here.
        devices: dotted path ``package.module:NAME`` of a sequence of ``DeviceFigures``, by which ``opgraft plan`` knows
            devices of the platform.
    """

    probe: Callable[[Machine], Evidence]
    platform_class: str | Callable[[], type[Platform]]
    priority: int = 0
    sightings: Callable[[Machine], Iterable[Sighting]] | None = None
    devices: str | None = None

    def load_class(self) -> type[Platform]:
        """Return the class of the platform. Raises whatever its module does."""
        if callable(self.platform_class):
            return self.platform_class()
        module, _, name = self.platform_class.partition(":")
        found: type[Platform] = getattr(importlib.import_module(module), name)
        return found


@dataclass(frozen=True)
class DeviceCapability:
    """The capability of a device, as frozen data.

    Attributes:
        name: the marketing or model name of the device.
        dtypes: the floating-point dtypes that kernels may be given.
        fp8_dtype: the fp8 format that the device's arithmetic uses, or ``None``.
        features: instruction sets or a compute level, such as ``("avx2", "avx512f")`` or ``("sm_90",)``.
            A platform with ``cpu`` in its dispatch chain names the instruction sets of its CPU as
            ``/proc/cpuinfo`` does, for kernels of CPUs such as packed linear layers. If a platform
            that inherits these kernels states nothing, the host's count.
        computes_float64: if False, the host samples tokens.
    """

    name: str
    dtypes: tuple[torch.dtype, ...]
    fp8_dtype: torch.dtype | None = None
    features: tuple[str, ...] = ()
    computes_float64: bool = True


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a device in bytes."""

    total: int
    free: int


class Platform(ABC):
    """A kind of device that this process can run on. One instance serves the process, without device state of its own.

    Creating a platform must not initialise a device: only a method that takes a device index may.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of its entry point, short and lowercase."""

    @property
    @abstractmethod
    def device_type(self) -> str:
        """The ``torch.device`` type that its tensors live on."""

    @property
    @abstractmethod
    def dispatch_chain(self) -> tuple[str, ...]:
        """The dispatch keys to try, best first, from ``DISPATCH_KEYS``; ``oot`` and ``native`` may be left out."""

    @abstractmethod
    def device_count(self) -> int:
        """Count the devices that this process sees."""

    @abstractmethod
    def capability(self, index: int = 0) -> DeviceCapability:
        """Return the capability of device ``index``."""

    @abstractmethod
    def memory(self, index: int = 0) -> DeviceMemory:
        """Return total and free memory of device ``index``."""

    @abstractmethod
    def synchronize(self, index: int = 0) -> None:
        """Wait until device ``index`` has finished all work that was queued on it."""

    @abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed the random generators of all devices."""

    @property
    def runs_cpu_kernels(self) -> bool:
        """Tell whether kernels for CPUs serve it, behind those of its dispatch chain.

        By default they do if its tensors are in the memory of the host. A platform that only stands for another device
        there returns ``False``.
        """
        return self.device_type == HOST

    @property
    def distributed_backend(self) -> str:
        """The ``torch.distributed`` backend of its collectives."""
        return "gloo"

    @property
    def compile_backend(self) -> str:
        """The ``torch.compile`` backend that serves it best."""
        return "inductor"

    @property
    def visibility_variable(self) -> str | None:
        """The environment variable that hides devices from a process, or ``None``."""
        return None

    @property
    def ray_device_key(self) -> str | None:
        """The name that Ray counts such devices under, as ``"GPU"``; ``None`` where it counts processors only."""
        return None

    @property
    def graph_class(self) -> type[Any] | None:
        """The class that captures and replays a sequence of kernels on it, or ``None`` where there is none."""
        return None

    @property
    def streams(self) -> Any | None:
        """torch's names for queues of work: ``Stream``, ``Event``, ``current_stream`` and the scope ``stream``.

        A module that has them, such as ``torch.cuda``, or ``None`` where all work is in one queue.
        """
        return None

    def prepare(self, config: OpgraftConfig) -> None:  # noqa: B027  # optional
        """Set up what holds for the whole process; called once, when plugins have been loaded, with the settings."""

    @property
    def kernel_packages(self) -> Mapping[str, Collection[str]]:
        """Distributions with more kernels for it, each with the names of the ops that it serves."""
        return {}

    def default_config(self) -> OpgraftConfig:
        """Return the settings that this platform changes; the lowest layer above the built-in defaults."""
        return OpgraftConfig()


def effective_chain(platform: Platform) -> tuple[str, ...]:
    """Return the dispatch chain as it is walked: ``oot``, what the platform declares, ``cpu`` if that fits, ``native``.

    Raises:
        PlatformError: the platform declares a key that is not a dispatch key, or one twice.
    """
    declared = tuple(key for key in platform.dispatch_chain if key not in ("oot", "native"))
    unknown = [key for key in declared if key not in DISPATCH_KEYS]
    if unknown or len(set(declared)) != len(declared):
        raise PlatformError(
            f"platform {platform.name!r} ({type(platform).__module__}) declares the dispatch chain {declared}: "
            f"each key may stand once and must be one of {DISPATCH_KEYS}"
        )
    inherited = () if HOST in declared or not platform.runs_cpu_kernels else (HOST,)
    return ("oot", *declared, *inherited, "native")


def cpu_features(platform: Platform) -> tuple[str, ...]:
    """Return the instruction sets that kernels for CPUs go by: what a platform states, or those of the host.

    The host's count for a platform that inherits kernels for CPUs and states nothing.
    """
    stated = platform.capability().features
    if stated or not platform.runs_cpu_kernels:
        return stated
    return _host_features()


@functools.cache  # the file stays as it is
def _host_features() -> tuple[str, ...]:
    return features_of(Machine().read(CPUINFO) or "")
