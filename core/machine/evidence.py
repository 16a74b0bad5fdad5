"""The answer of a probe: devices, facts, and a verdict about their use."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from opgraft.base.text import printable

_LARGEST = 1 << 60
"""Bytes of a device, or a node number, that no device has."""

MOST_DEVICES = 10_000
"""Devices or facts of one answer."""


@dataclass(frozen=True)
class Fact:
    """One observation.

    Attributes:
        source: the file, variable or call.
        value: the answer.
    """

    source: str
    value: str

    def __post_init__(self) -> None:
        if not isinstance(self.source, str) or not isinstance(self.value, str):
            raise TypeError(f"a Fact has a source or value that is no string: {reprlib.repr(self)}")


@dataclass(frozen=True)
class Device:
    """One device, or one partition of a device. Unknown attributes are ``None`` or empty.

    Attributes:
        name: model.
        capability: compute level or instruction sets.
        memory: bytes.
        pci_address: such as ``0000:62:00.0``.
        numa_node: the memory node of the device.
        driver: kernel driver and version.
        hidden: a visibility variable hides the device from this process.
    """

    name: str
    capability: str | None = None
    memory: int | None = None
    pci_address: str | None = None
    numa_node: int | None = None
    driver: str | None = None
    hidden: bool = False

    def __post_init__(self) -> None:
        optional_texts = (self.capability, self.pci_address, self.driver)
        texts = [self.name, *(text for text in optional_texts if text is not None)]
        numbers = [number for number in (self.memory, self.numa_node) if number is not None]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError(
                "a Device has a name, capability, pci_address or driver that is no string: "
                f"{self!r:.300}"
            )
        if not all(isinstance(number, int) for number in numbers):
            raise TypeError(
                f"a Device has a memory (bytes) or numa_node that is no integer: {self!r:.300}"
            )
        if not all(0 <= number < _LARGEST for number in numbers):
            raise ValueError(
                f"a Device has a memory (bytes) or numa_node that none has: {self!r:.300}"
            )

    def __str__(self) -> str:
        memory = _size(self.memory) if self.memory else None
        hidden = "hidden" if self.hidden else None
        parts = (self.name, self.capability, memory, self.driver, hidden)
        return printable(", ".join(part for part in parts if part))


def _size(memory: int) -> str:
    name, unit = ("GiB", 1 << 30) if memory >= 1 << 30 else ("MiB", 1 << 20)
    rounded = (memory + unit // 2) // unit
    return f"{rounded} {name}"


@dataclass(frozen=True)
class Evidence:
    """The findings of a probe.

    Attributes:
        available: the platform can be used. ``False`` with devices means hardware without, for
            example, a driver.
        reason: a sentence about ``available``. It names the missing part.
        devices: the hardware.
        facts: the observations behind the findings.
        remedy: the next step of the user, empty if there is none.
    """

    available: bool
    reason: str
    devices: tuple[Device, ...] = ()
    facts: tuple[Fact, ...] = ()
    remedy: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.available, bool):
            raise TypeError(
                f"Evidence takes True or False for available, got {reprlib.repr(self.available)}"
            )
        for name, text in (("reason", self.reason), ("remedy", self.remedy)):
            if not isinstance(text, str):
                raise TypeError(f"Evidence takes a string for {name}, got {reprlib.repr(text)}")
        _check_items("devices", Device, self.devices)
        _check_items("facts", Fact, self.facts)

    def device_lines(self) -> Iterator[str]:
        """Yield the devices in words, with the number of equal ones."""
        texts = [str(device) for device in self.devices]
        for text in dict.fromkeys(texts):
            yield f"{texts.count(text)} x {text}"

    def lines(self) -> Iterator[str]:
        """Yield the evidence in words: devices, facts, and the remedy."""
        yield from self.device_lines()
        yield from (printable(f"{fact.source}: {fact.value}") for fact in self.facts)
        if self.remedy:
            yield printable(f"to use it: {self.remedy}")

    def to_dict(self) -> dict[str, Any]:
        """Return the evidence as plain data, ready for ``json.dumps``."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Evidence:
        """Undo ``to_dict``, for evidence that a child process printed."""
        return cls(
            available=data["available"],
            reason=data["reason"],
            devices=tuple(Device(**device) for device in data["devices"]),
            facts=tuple(Fact(**fact) for fact in data["facts"]),
            remedy=data.get("remedy", ""),
        )


def _check_items(name: str, kind: type, items: Any) -> None:
    """Check the devices or the facts of an ``Evidence``.

    Raises:
        TypeError: an item is of another class.
        ValueError: there are too many.
    """
    # A probe of a plugin may answer anything.
    is_sequence = isinstance(items, (tuple, list))
    if not is_sequence or not all(isinstance(item, kind) for item in items):
        raise TypeError(
            f"Evidence takes opgraft.{kind.__name__} in {name}, got {reprlib.repr(items)}"
        )
    if len(items) > MOST_DEVICES:
        raise ValueError(f"Evidence takes {MOST_DEVICES:,} {name} at most, got {len(items):,}")


@dataclass(frozen=True)
class Sighting:
    """Accelerators of one kind in a table of PCI ids or device nodes.

    Attributes:
        kind: such as "Ascend NPU".
        count: the number of accelerators.
        source: the folder or device node with the accelerators.
        addresses: PCI addresses, if known.
        remedy: the usual plugin.
    """

    kind: str
    count: int
    source: str
    addresses: tuple[str, ...]
    remedy: str

    def lines(self) -> Iterator[str]:
        """Yield the find and the remedy in words."""
        yield printable(
            f"hardware found, no plugin installed: {self.count} x {self.kind} ({self.source})"
        )
        yield printable(f"  to use it: {self.remedy}")

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
