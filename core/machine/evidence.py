"""Answers of a probe: facts, devices, and whether they can be used."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from opgraft.base.text import printable

_LARGEST = 1 << 60  # bytes of a device
_MOST = 10_000  # devices or facts


@dataclass(frozen=True)
class Fact:
    """One observation: the file, variable or call that was asked (``source``) and what it said (``value``)."""

    source: str
    value: str

    def __post_init__(self) -> None:
        if not isinstance(self.source, str) or not isinstance(self.value, str):
            raise TypeError(f"a Fact has a source or value that is no string: {reprlib.repr(self)}")


@dataclass(frozen=True)
class Device:
    """One device, or one partition of a device, that a probe found; ``None`` and "" where no file tells.

    Attributes:
        name: model.
        capability: compute level or instruction sets.
        memory: bytes.
        pci_address: such as ``0000:62:00.0``.
        numa_node: the memory node that it is attached to.
        driver: kernel driver and version.
        hidden: whether a visibility variable hides it from this process.
    """

    name: str
    capability: str | None = None
    memory: int | None = None
    pci_address: str | None = None
    numa_node: int | None = None
    driver: str | None = None
    hidden: bool = False

    def __post_init__(self) -> None:
        texts = (self.capability, self.pci_address, self.driver)
        numbers = (self.memory, self.numa_node)
        if not isinstance(self.name, str) or not all(
            text is None or isinstance(text, str) for text in texts
        ):
            raise TypeError(
                f"a Device has a name, capability, pci_address or driver that is no string: {self!r:.300}"
            )
        if not all(number is None or isinstance(number, int) for number in numbers):
            raise TypeError(
                f"a Device has a memory (bytes) or numa_node that is no integer: {self!r:.300}"
            )
        if not all(number is None or 0 <= number < _LARGEST for number in numbers):
            raise ValueError(
                f"a Device has a memory (bytes) or numa_node that none has: {self!r:.300}"
            )

    def __str__(self) -> str:
        memory = _size(self.memory) if self.memory else None
        parts = [self.name, self.capability, memory, self.driver, "hidden" if self.hidden else None]
        return printable(", ".join(part for part in parts if part))


def _size(memory: int) -> str:
    unit, exponent = ("GiB", 30) if memory >= 2**30 else ("MiB", 20)
    return f"{(memory + 2 ** (exponent - 1)) // 2**exponent} {unit}"


@dataclass(frozen=True)
class Evidence:
    """The findings of a probe: whether the platform can be used, why, and the facts that say so.

    Devices without availability mean hardware that cannot be used: ``reason`` then says what is missing and
    ``remedy`` what to do about it.
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
        for name, kind, items in (("devices", Device, self.devices), ("facts", Fact, self.facts)):
            if not isinstance(items, (tuple, list)) or not all(
                isinstance(item, kind) for item in items
            ):
                raise TypeError(
                    f"Evidence takes opgraft.{kind.__name__} in {name}, got {reprlib.repr(items)}"
                )
            if len(items) > _MOST:
                raise ValueError(f"Evidence takes {_MOST:,} {name} at most, got {len(items):,}")

    def device_lines(self) -> Iterator[str]:
        """Yield the devices in words, equal ones counted."""
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


@dataclass(frozen=True)
class Sighting:
    """Accelerators of one kind that a table of PCI ids or device nodes recognises.

    Attributes:
        kind: what they are, such as "Ascend NPU".
        count: how many.
        source: where they were seen, a folder or a device node.
        addresses: their PCI addresses, where known.
        remedy: what usually serves them.
    """

    kind: str
    count: int
    source: str
    addresses: tuple[str, ...]
    remedy: str

    def lines(self) -> Iterator[str]:
        """Yield what was found and what serves it, in words."""
        yield printable(
            f"hardware found, no plugin installed: {self.count} x {self.kind} ({self.source})"
        )
        yield printable(f"  to use it: {self.remedy}")

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
