"""Simulated accelerators for machines without an accelerator: properties, and the probe.

Importing this module does not import torch, as ``opgraft detect`` needs the probe only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from opgraft.config.environment import SIMULATED_DEVICE
from opgraft.engine.planning.units import parse_quantity
from opgraft.errors import InputError, close_matches
from opgraft.machine.evidence import Device, Evidence, Fact
from opgraft.machine.machine import Machine
from opgraft.platform import PlatformSpec

DEVICE_TYPE = "simulated"
"""The ``torch.device`` type of tensors, and the name of the platform."""

_DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class SimulatedDevice:
    """A simulated accelerator, as ``OPGRAFT_SIMULATED_DEVICE`` describes the device.

    Attributes:
        name: of the device, of any vendor.
        features: the compute level or the instruction sets.
        memory: bytes; one byte more raises ``torch.OutOfMemoryError``.
        dtypes: floating-point dtypes that the device computes with; another dtype raises.
        fails_after: kernels before the device fails; ``None``: the device never fails.
        seconds: the delay of each kernel.
    """

    name: str = "Simulated accelerator"
    features: tuple[str, ...] = ()
    memory: int = 8 << 30
    dtypes: tuple[str, ...] = _DTYPES[1:]
    fails_after: int | None = None
    seconds: float = 0.0

    @classmethod
    def parse(cls, text: str) -> SimulatedDevice:
        """Return the device of a text such as ``name=Acme X1,memory=64MiB,fails_after=100``.

        Parts that are left out have their defaults; ``default`` leaves out everything.

        Raises:
            InputError: a name is unknown, stands twice, or has a wrong value.
        """
        found: dict[str, Any] = {}
        parts = [] if text.strip() == "default" else text.split(",")
        for part in parts:
            # A value may hold an equals sign.
            name, _, value = (each.strip() for each in part.partition("="))
            if name not in _PARSERS or name in found:
                raise InputError(
                    f"{SIMULATED_DEVICE}={text!r:.80}: {name!r:.40} is no part of a simulated "
                    f"device, or stands twice: {close_matches(name, _PARSERS)} Give name=value "
                    "pairs separated by commas, or 'default'."
                )
            found[name] = _PARSERS[name](value)
        return cls(**found)


def _bytes(text: str) -> int:
    return int(parse_quantity(text, "bytes", f"memory of {SIMULATED_DEVICE}"))


def _seconds(text: str) -> float:
    return parse_quantity(text, "seconds", f"seconds of {SIMULATED_DEVICE}")


def _calls(text: str) -> int:
    if not text.isdecimal():
        raise InputError(
            f"fails_after of {SIMULATED_DEVICE} is {text!r:.40}: give a number of kernels, "
            "such as 100"
        )
    return int(text)


def _dtypes(text: str) -> tuple[str, ...]:
    names = tuple(text.split())
    # float64 is allowed, as some real devices have float64.
    if not names or not set(names) <= set(_DTYPES):
        raise InputError(
            f"dtypes of {SIMULATED_DEVICE} is {text!r:.80}: give some of {' '.join(_DTYPES)}"
        )
    return names


_PARSERS: Mapping[str, Callable[[str], Any]] = {
    "name": str,
    "features": lambda text: tuple(text.split()),
    "memory": _bytes,
    "dtypes": _dtypes,
    "fails_after": _calls,
    "seconds": _seconds,
}


def simulated_device(machine: Machine) -> SimulatedDevice | None:
    """Return the simulated device of a machine; ``None`` if the environment names no device.

    Raises:
        InputError: as ``SimulatedDevice.parse``.
    """
    text = machine.environ.get(SIMULATED_DEVICE)
    return SimulatedDevice.parse(text) if text else None


def probe(machine: Machine) -> Evidence:
    """Look for the simulated device of a machine."""
    # The value of the variable explains the verdict.
    facts = (Fact(SIMULATED_DEVICE, machine.environ.get(SIMULATED_DEVICE, "")),)
    try:
        device = simulated_device(machine)
    # A probe never raises. The platform is chosen all the same, and raises the reason when it is
    # made: whoever names a device must not be answered by another one.
    except InputError as error:
        return Evidence(True, str(error), facts=facts)
    if device is None:
        return Evidence(False, f"{SIMULATED_DEVICE} is not set", facts=facts)
    level = " ".join(device.features) or None
    found = Device(device.name, level, device.memory)
    return Evidence(True, f"1 simulated device: {device.name}", (found,), facts)


SPEC = PlatformSpec(probe, "opgraft.testing.simulated_platform:SimulatedPlatform", priority=1000)
"""The platform comes before any real device if the variable is set."""
