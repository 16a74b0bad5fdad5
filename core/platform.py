"""The contract with a device: ``PlatformSpec`` to find a device, ``Platform`` to use the device."""

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

# Probes import this module, and detection does without torch.
if TYPE_CHECKING:
    import torch

DISPATCH_KEYS = ("oot", "cpu", "cuda", "hip", "xpu", "tpu", "native")
"""All dispatch keys. The kernel for ``key`` is the method ``forward_<key>`` of an op class."""

HOST = "cpu"
"""The ``torch.device`` type of tensors in the host's memory, and the host's dispatch key."""


@dataclass(frozen=True)
class PlatformSpec:
    """The target of an entry point of the group ``opgraft.platforms``.

    The module of the target must not import torch.

    Attributes:
        probe: returns evidence about the platform from files and variables of a machine. Never
            raises.
        platform_class: dotted path ``package.module:Class`` of the ``Platform``, or a function that
            returns the class. It is imported or called after the selection.
        priority: among built-in platforms the highest available one wins.
        sightings: for built-in platforms. Returns hardware of other platforms without a plugin.
        devices: dotted path ``package.module:NAME`` of a sequence of ``DeviceFigures`` for
            ``opgraft plan``.
    """

    probe: Callable[[Machine], Evidence]
    platform_class: str | Callable[[], type[Platform]]
    priority: int = 0
    sightings: Callable[[Machine], Iterable[Sighting]] | None = None
    devices: str | None = None

    def load_class(self) -> type[Platform]:
        """Return the class of the platform.

        Raises:
            Exception: the module or the function raises.
        """
        if callable(self.platform_class):
            return self.platform_class()
        # A path, not a class: detection must not import torch.
        module, _, name = self.platform_class.partition(":")
        found: type[Platform] = getattr(importlib.import_module(module), name)
        return found


@dataclass(frozen=True)
class DeviceCapability:
    """The capability of a device, as frozen data.

    Attributes:
        name: the marketing or model name of the device.
        dtypes: the floating-point dtypes that kernels take.
        fp8_dtype: the fp8 format of the device's arithmetic, or ``None``.
        features: instruction sets or a compute level, such as ``("avx2", "avx512f")`` or
            ``("sm_90",)``. A platform with ``cpu`` in the dispatch chain names the instruction sets
            as ``/proc/cpuinfo`` does, for kernels such as packed linear layers. If a platform
            inherits the kernels of CPUs and names nothing, the features of the host count.
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
    """A kind of device. One instance without device state serves the process.

    The constructor must not initialise a device. A method with a device index may.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the entry point, short and lowercase."""

    @property
    @abstractmethod
    def device_type(self) -> str:
        """The ``torch.device`` type of tensors on the device."""

    @property
    @abstractmethod
    def dispatch_chain(self) -> tuple[str, ...]:
        """Dispatch keys of ``DISPATCH_KEYS``, best first; ``oot`` and ``native`` are optional."""

    @abstractmethod
    def device_count(self) -> int:
        """Return the number of devices that this process sees."""

    @abstractmethod
    def capability(self, index: int = 0) -> DeviceCapability:
        """Return the capability of device ``index``."""

    @abstractmethod
    def memory(self, index: int = 0) -> DeviceMemory:
        """Return total and free memory of device ``index``."""

    @abstractmethod
    def synchronize(self, index: int = 0) -> None:
        """Wait until device ``index`` has finished all queued work."""

    @abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed the random generators of all devices."""

    @property
    def runs_cpu_kernels(self) -> bool:
        """True if kernels for CPUs serve the platform, behind the keys of the dispatch chain.

        The default is True if tensors are in the memory of the host. A platform that simulates
        another device there returns ``False``.
        """
        return self.device_type == HOST

    @property
    def distributed_backend(self) -> str:
        """The ``torch.distributed`` backend for collectives."""
        return "gloo"

    @property
    def compile_backend(self) -> str:
        """The best ``torch.compile`` backend."""
        return "inductor"

    @property
    def visibility_variable(self) -> str | None:
        """The environment variable that hides devices from a process, or ``None``."""
        return None

    @property
    def ray_device_key(self) -> str | None:
        """Ray's name for the devices, such as ``"GPU"``. ``None`` if Ray counts CPUs only."""
        return None

    @property
    def graph_class(self) -> type[Any] | None:
        """The class that captures and replays a sequence of kernels, or ``None``."""
        return None

    @property
    def streams(self) -> Any | None:
        """The module with ``Stream``, ``Event``, ``current_stream`` and the scope ``stream``.

        Such as ``torch.cuda``. ``None`` if all work is in one queue.
        """
        return None

    def prepare(self, config: OpgraftConfig) -> None:  # noqa: B027  # optional
        """Set the process up. Called once with the settings, after the load of plugins."""

    @property
    def kernel_packages(self) -> Mapping[str, Collection[str]]:
        """Distributions with more kernels for the platform → names of the ops with a kernel."""
        return {}

    def default_config(self) -> OpgraftConfig:
        """Return the settings that this platform changes: the layer above the built-in defaults."""
        return OpgraftConfig()


def effective_chain(platform: Platform) -> tuple[str, ...]:
    """Return the whole dispatch chain of a platform.

    The chain is ``oot``, the declared keys, ``cpu`` if kernels for CPUs serve the platform, and
    ``native``. Example: a platform with the keys ``("hip", "cuda")`` has the chain
    ``("oot", "hip", "cuda", "native")``.

    Raises:
        PlatformError: the platform declares an unknown key, or a key twice.
    """
    # These two are first and last in every chain, wherever a platform lists them.
    declared = tuple(key for key in platform.dispatch_chain if key not in ("oot", "native"))
    unknown = [key for key in declared if key not in DISPATCH_KEYS]
    if unknown or len(set(declared)) != len(declared):
        raise PlatformError(
            f"platform {platform.name!r} ({type(platform).__module__}) declares the dispatch chain "
            f"{declared}: each key may stand once and must be one of {DISPATCH_KEYS}"
        )
    # The declared keys come first: a class that lists the host is not asked for more.
    if HOST not in declared and platform.runs_cpu_kernels:
        declared = (*declared, HOST)
    return ("oot", *declared, "native")


def cpu_features(platform: Platform) -> tuple[str, ...]:
    """Return the instruction sets for the choice of CPU kernels.

    If a platform inherits kernels for CPUs and states no features, return those of the host.
    """
    stated = platform.capability().features
    if stated or not platform.runs_cpu_kernels:
        return stated
    return _host_features()


# The file does not change while the process runs.
@functools.cache
def _host_features() -> tuple[str, ...]:
    return features_of(Machine().read(CPUINFO) or "")
