"""The probe for discrete Intel GPUs and for obstacles to torch.xpu."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from opgraft.machine.evidence import Device, Evidence, Fact
from opgraft.machine.machine import Machine
from opgraft.platforms.obstacles import (
    FoundDevice,
    Obstacle,
    counted_usable,
    hide,
    obstacle_facts,
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
    """Return evidence for XPUs. GPUs that are a part of the processor do not count."""
    functions = pci_functions(machine, VENDOR)
    displays = [function for function in functions if function.kind == DISPLAY]
    if not displays:
        return absence(machine, VENDOR, "Intel GPU", "display controller of vendor 8086")
    cards = _cards(machine, displays)
    if not cards:
        return _only_integrated(displays)
    found = [_found(machine, function, card) for function, card in cards.items()]
    within_reach = usable(found)
    tiles = {function.address: card.tiles for function, card in cards.items()}
    in_reach = [one.device for one in within_reach]
    units = _all_units(machine, in_reach, tiles)
    visible = _visible(machine, len(units))
    obstacles = (
        within_reach[0].obstacle,
        _all_hidden(machine, visible),
        torch_obstacle(machine, "xpu", _INSTALL),
    )
    summary = _summary_of_gpus(found, within_reach, len(units))
    devices = hide(units, visible)
    facts = _facts(machine, found)
    return verdict(summary, devices, obstacles, facts)


def _cards(machine: Machine, displays: Sequence[PciFunction]) -> dict[PciFunction, Card]:
    """Return the discrete cards among the display controllers."""
    cards = {}
    for function in displays:
        card = _card(machine, function)
        if card:
            cards[function] = card
    return cards


def _only_integrated(displays: Sequence[PciFunction]) -> Evidence:
    """Return the evidence of a machine with integrated GPUs alone."""
    facts = []
    for function in displays:
        value = f"GPU {function.device:04x} of the processor"
        facts.append(Fact(function.folder, value))
    reason = "only a GPU that is part of the processor, no discrete one"
    return Evidence(False, reason, facts=tuple(facts))


def _card(machine: Machine, function: PciFunction) -> Card | None:
    """Return the card with the id, or a card with an unknown id that has memory."""
    known = CARDS.get(function.device)
    of_tiles = list(_tile_memory(machine, function))
    total = sum(of_tiles or _card_memory(machine, function))
    memory = total // 2**30
    # A driver that is not loaded tells nothing, so the table counts then.
    if known:
        tiles = len(of_tiles) or known.tiles
        return replace(known, tiles=tiles, memory=memory or known.memory)
    # An integrated GPU uses the memory of the host.
    if not memory:
        return None
    name = f"GPU {function.device:04x}"
    return Card(name, "", len(of_tiles) or 1, memory)


def _tile_memory(machine: Machine, function: PciFunction) -> Iterator[int]:
    """Yield bytes of each tile, from the driver xe.

    Source: tests/intel/xe_sysfs_tile.c of igt-gpu-tools.
    """
    for name in machine.names(function.folder):
        if re.fullmatch(r"tile\d", name):
            yield from _numbers_in_file(
                machine, f"{function.folder}/{name}/physical_vram_size_bytes"
            )


def _card_memory(machine: Machine, function: PciFunction) -> Iterator[int]:
    """Yield bytes of the card, from Intel's driver i915.

    Source: intel/intel-device-plugins-for-kubernetes.
    """
    folder = f"{function.folder}/drm"
    for name in machine.names(folder):
        # Other entries are render nodes.
        if re.fullmatch(r"card\d{1,3}", name):
            yield from _numbers_in_file(machine, f"{folder}/{name}/lmem_total_bytes")


def _numbers_in_file(machine: Machine, path: str) -> Iterator[int]:
    text = (machine.read(path) or "").strip()
    if not re.fullmatch(r"[0-9]{1,15}", text):
        return
    number = int(text)
    if number:
        yield number


def _found(machine: Machine, function: PciFunction, card: Card) -> FoundDevice:
    """Return a card, with the obstacle if the card cannot be used."""
    memory = None
    if card.memory:
        memory = card.memory * 2**30
    device = Device(
        name=f"Intel {card.name}",
        capability=card.architecture or None,
        memory=memory,
        pci_address=function.address,
        numa_node=function.numa_node,
        driver=function.driver,
    )
    return FoundDevice(device, obstacle=_obstacle_of_gpu(machine, function))


def _obstacle_of_gpu(machine: Machine, function: PciFunction) -> Obstacle | None:
    """Return the first obstacle to a GPU: the driver, the device node, or the permission."""
    if function.driver not in DRIVERS:
        bound = "has no driver"
        if function.driver:
            bound = f"is bound to the driver {function.driver}"
        load = "load xe, or i915 for cards older than Arc B (sudo modprobe xe)"
        return Obstacle(f"{function.address} {bound}", load)
    names = machine.names(f"{function.folder}/drm")
    render_nodes = [name for name in names if re.fullmatch(r"renderD\d{1,4}", name)]
    # Without a driver's entry, only the pattern of the name is known.
    node = f"/dev/dri/{render_nodes[0]}" if render_nodes else "/dev/dri/renderD*"
    # /sys shows the nodes of the host, and a container may lack them.
    if not render_nodes or not machine.exists(node):
        missing = f"there is no device node {node} for {function.address}"
        return Obstacle(missing, "in a container: start it with --device /dev/dri")
    if not machine.may_open(node):
        join = "join its group (sudo usermod -aG render $USER), log in again"
        return Obstacle(f"this user may not open {node}", join)
    return None


def _composite(machine: Machine) -> bool:
    """Return True if the variable makes a card one device, with any number of tiles."""
    value = machine.environ.get(HIERARCHY, "")
    return value.strip().upper() == "COMPOSITE"


def _all_units(machine: Machine, cards: Sequence[Device], tiles: Mapping[str, int]) -> list[Device]:
    """Return the devices of cards: their tiles, or one device for each composite card.

    Args:
        machine: the machine.
        cards: the cards in reach.
        tiles: the number of tiles by PCI address.
    """
    units: list[Device] = []
    for card in cards:
        address = card.pci_address or ""
        parts = tiles[address]
        if _composite(machine):
            parts = 1
        units += _units(card, parts)
    return units


def _units(card: Device, tiles: int) -> list[Device]:
    """Return the devices that Level Zero makes of a card: one per tile.

    Source: "Exposing the Device Hierarchy" in Intel's oneAPI GPU Optimization Guide.
    """
    if tiles == 1:
        return [card]
    name = f"{card.name}, 1 of {tiles} tiles"
    # The figure is that of the whole card.
    memory = (card.memory or 0) // tiles or None
    return [replace(card, name=name, memory=memory)] * tiles


def _visible(machine: Machine, count: int) -> tuple[int, ...]:
    """Return the visible positions. An empty mask hides nothing.

    An entry is the number of a device, or ``0.1`` for tile 1 of card 0 if cards are the devices.
    Source: the Level Zero specification, programming guide, "Affinity Mask".
    """
    entries = [entry.strip() for entry in machine.environ.get(MASK, "").split(",")]
    # Blanks between commas name no device.
    named = [entry for entry in entries if entry]
    if not named:
        return tuple(range(count))
    numbers = {entry.partition(".")[0] for entry in named}
    return tuple(index for index in range(count) if str(index) in numbers)


def _all_hidden(machine: Machine, visible: Sequence[int]) -> Obstacle | None:
    if visible:
        return None
    hides = f"{MASK}={machine.environ.get(MASK)!r} hides all of them"
    return Obstacle(hides, f"unset {MASK}, or name devices that exist")


def _summary_of_gpus(
    found: Sequence[FoundDevice], within_reach: Sequence[FoundDevice], devices: int
) -> str:
    text = counted_usable(within_reach, found, "Intel GPU")
    # A card with tiles is several devices.
    if devices > len(within_reach):
        text += f", {devices} devices"
    return text


def _facts(machine: Machine, found: Sequence[FoundDevice]) -> list[Fact]:
    facts = []
    for name in (MASK, HIERARCHY):
        value = machine.environ.get(name)
        if value:
            facts.append(Fact(name, value))
    return facts + obstacle_facts(found)
