"""The probe for discrete Intel GPUs, and for what keeps torch.xpu from using them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from opgraft.machine.evidence import Device, Evidence, Fact
from opgraft.machine.machine import Machine
from opgraft.platforms.obstacles import (
    FoundDevice,
    Obstacle,
    counted,
    hide,
    torch_obstacle,
    usable,
    verdict,
)
from opgraft.platforms.pci import PciFunction, absence, pci_functions
from opgraft.platforms.xpu.cards import CARDS, Card

VENDOR = 0x8086
DISPLAY = 0x03
DRIVERS = ("xe", "i915")
MASK = "ZE_AFFINITY_MASK"
HIERARCHY = "ZE_FLAT_DEVICE_HIERARCHY"
_INSTALL = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/xpu"


def probe(machine: Machine) -> Evidence:
    """Give evidence for XPUs. A GPU that is part of a processor is none: it has no memory of its own."""
    functions = [
        function for function in pci_functions(machine, VENDOR) if function.kind == DISPLAY
    ]
    if not functions:
        return absence(machine, VENDOR, "Intel GPU", "display controller of vendor 8086")
    cards = {function: card for function in functions if (card := _card(machine, function))}
    if not cards:
        facts = [
            Fact(function.folder, f"GPU {function.device:04x} of the processor")
            for function in functions
        ]
        return Evidence(
            False, "only a GPU that is part of the processor, no discrete one", facts=tuple(facts)
        )
    found = [_found(machine, function, card) for function, card in cards.items()]
    within_reach = usable(found)
    tiles = {
        function.address: 1 if _composite(machine) else card.tiles
        for function, card in cards.items()
    }
    units = [
        unit
        for one in within_reach
        for unit in _units(one.device, tiles[one.device.pci_address or ""])
    ]
    visible = _visible(machine, len(units))
    return verdict(
        _summary_of_gpus(found, within_reach, len(units)),
        hide(units, visible),
        (
            within_reach[0].obstacle,
            _all_hidden(machine, visible),
            torch_obstacle(machine, "xpu", _INSTALL),
        ),
        _facts(machine, found),
    )


def _card(machine: Machine, function: PciFunction) -> Card | None:
    """Return the card by its id; one with an unknown id and memory of its own counts too, integrated GPUs do not."""
    known = CARDS.get(function.device)
    of_tiles = list(_tile_memory(machine, function))
    memory = sum(of_tiles or _card_memory(machine, function)) // 2**30
    if known is None:
        return (
            Card(f"GPU {function.device:04x}", "", len(of_tiles) or 1, memory) if memory else None
        )
    return replace(known, tiles=len(of_tiles) or known.tiles, memory=memory or known.memory)


def _tile_memory(machine: Machine, function: PciFunction) -> Iterator[int]:
    """Yield bytes of each tile, as the driver xe tells (igt-gpu-tools reads it, tests/intel/xe_sysfs_tile.c)."""
    for name in machine.names(function.folder):
        if re.fullmatch(r"tile\d", name):
            yield from _number(machine, f"{function.folder}/{name}/physical_vram_size_bytes")


def _card_memory(machine: Machine, function: PciFunction) -> Iterator[int]:
    """Yield bytes of the card, as Intel's i915 tells (intel/intel-device-plugins-for-kubernetes reads it)."""
    for name in machine.names(f"{function.folder}/drm"):
        if re.fullmatch(r"card\d{1,3}", name):
            yield from _number(machine, f"{function.folder}/drm/{name}/lmem_total_bytes")


def _number(machine: Machine, path: str) -> Iterator[int]:
    text = (machine.read(path) or "").strip()
    if re.fullmatch(r"[0-9]{1,15}", text) and int(text):
        yield int(text)


def _found(machine: Machine, function: PciFunction, card: Card) -> FoundDevice:
    device = Device(
        name=f"Intel {card.name}",
        capability=card.architecture or None,
        memory=card.memory * 2**30 if card.memory else None,
        pci_address=function.address,
        numa_node=function.numa_node,
        driver=function.driver,
    )
    return FoundDevice(device, obstacle=_obstacle_of_gpu(machine, function))


def _obstacle_of_gpu(machine: Machine, function: PciFunction) -> Obstacle | None:
    if function.driver not in DRIVERS:
        bound = f"is bound to the driver {function.driver}" if function.driver else "has no driver"
        return Obstacle(
            f"{function.address} {bound}",
            "load xe, or i915 for cards older than Arc B (sudo modprobe xe)",
        )
    nodes = [
        name
        for name in machine.names(f"{function.folder}/drm")
        if re.fullmatch(r"renderD\d{1,4}", name)
    ]
    node = f"/dev/dri/{nodes[0]}" if nodes else ""
    if not node or not machine.exists(node):
        remedy = "in a container: start it with --device /dev/dri"
        return Obstacle(
            f"there is no device node {node or '/dev/dri/renderD*'} for {function.address}", remedy
        )
    if not machine.may_open(node):
        return Obstacle(
            f"this user may not open {node}",
            "join its group (sudo usermod -aG render $USER), log in again",
        )
    return None


def _composite(machine: Machine) -> bool:
    return machine.environ.get(HIERARCHY, "").strip().upper() == "COMPOSITE"


def _units(card: Device, tiles: int) -> list[Device]:
    """Return the devices that Level Zero makes of a card: one per tile, unless the hierarchy is COMPOSITE.

    Source: "Exposing the Device Hierarchy" in Intel's oneAPI GPU Optimization Guide.
    """
    if tiles == 1:
        return [card]
    return [
        replace(
            card,
            name=f"{card.name}, 1 of {tiles} tiles",
            memory=(card.memory or 0) // tiles or None,
        )
    ] * tiles


def _visible(machine: Machine, count: int) -> tuple[int, ...]:
    """Return the positions that the mask leaves visible; an empty mask is none.

    An entry is the number of a device, or ``0.1`` for a tile where cards are the devices. Source: the Level Zero
    specification, programming guide, "Affinity Mask".
    """
    entries = [entry.strip() for entry in machine.environ.get(MASK, "").split(",") if entry.strip()]
    if not entries:
        return tuple(range(count))
    numbers = {entry.partition(".")[0] for entry in entries}
    return tuple(index for index in range(count) if str(index) in numbers)


def _all_hidden(machine: Machine, visible: Sequence[int]) -> Obstacle | None:
    if visible:
        return None
    return Obstacle(
        f"{MASK}={machine.environ.get(MASK)!r} hides all of them",
        f"unset {MASK}, or name devices that exist",
    )


def _summary_of_gpus(
    found: Sequence[FoundDevice], within_reach: Sequence[FoundDevice], devices: int
) -> str:
    some = f"{len(within_reach)} of {len(found)} Intel GPUs within reach"
    text = some if len(within_reach) < len(found) else counted(len(within_reach), "Intel GPU")
    return f"{text}, {devices} devices" if devices > len(within_reach) else text


def _facts(machine: Machine, found: Sequence[FoundDevice]) -> list[Fact]:
    facts = [
        Fact(name, machine.environ[name]) for name in (MASK, HIERARCHY) if machine.environ.get(name)
    ]
    return facts + [
        Fact(one.device.pci_address or "", one.obstacle.missing) for one in found if one.obstacle
    ]
