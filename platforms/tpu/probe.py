"""The probe for TPU chips. It reads PCI functions and device nodes.

Google's other PCI functions, such as network cards, share the vendor id. So a table of device ids
is needed. Sources of ids, memory and nodes: tpu_info/device.py of
AI-Hypercomputer/cloud-accelerator-diagnostics, torch_xla 2.9 (_internal/tpu.py) and torch_tpu 0.2.0
(_internal/utils/hardware.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opgraft.machine.evidence import Device, Evidence, Fact
from opgraft.machine.machine import Machine
from opgraft.platforms.obstacles import (
    FoundDevice,
    Obstacle,
    counted_usable,
    hide,
    obstacle_facts,
    usable,
    verdict,
)
from opgraft.platforms.pci import PciFunction, absence, pci_functions
from opgraft.platforms.tpu.packages import Choice, choose

VENDOR = 0x1AE0
VISIBILITY_VARIABLES = ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES")
SELECTOR = "PJRT_DEVICE"
CPU_CLIENT = "XLA's CPU client, for tests"


@dataclass(frozen=True)
class ChipGeneration:
    """A generation of chips. ``memory`` is the GiB of a chip.

    Source: the pages cloud.google.com/tpu/docs/{v2,v3,v4,v5e,v5p,v6e,tpu7x}.
    """

    name: str
    memory: int


GENERATIONS = {
    # v2 and v3 share a device id, and differ in the subsystem.
    (0x0027, 0x004E): ChipGeneration("v2", 16),
    (0x0027, 0x004F): ChipGeneration("v3", 32),
    (0x005E, None): ChipGeneration("v4", 32),
    (0x0062, None): ChipGeneration("v5p", 95),
    (0x0063, None): ChipGeneration("v5e", 16),
    (0x006F, None): ChipGeneration("v6e", 32),
    (0x0076, None): ChipGeneration("v7x", 192),
}


def probe(machine: Machine) -> Evidence:
    """Return evidence for TPUs.

    With torch_xla, PJRT_DEVICE=CPU makes the platform available on any machine, on XLA's CPU
    client. So programs can be tested without a chip. In an automatic choice, the platform then
    comes before the CPU platform and after the platforms of GPUs.
    """
    functions = [each for each in pci_functions(machine, VENDOR) if _generation(each)]
    wants_cpu = machine.environ.get(SELECTOR, "").upper() == "CPU"
    if not functions and not wants_cpu:
        return _absence(machine)
    choice = choose(machine)
    found = [_found(machine, function, index, choice) for index, function in enumerate(functions)]
    within_reach = usable(found)
    visible = _visible(machine, len(within_reach))
    devices = hide([one.device for one in within_reach], visible)
    facts = (*_facts(machine, found), *choice.facts)
    if wants_cpu and choice.package and choice.package.xla_clients:
        return Evidence(True, f"{SELECTOR}=CPU: {CPU_CLIENT}", devices, facts)
    if not found:
        return _neither(machine, choice, facts)
    obstacles = (
        within_reach[0].obstacle,
        _all_hidden(machine, visible),
        _no_runtime(machine, choice),
    )
    return verdict(_summary_of_chips(found, within_reach, choice), devices, obstacles, facts)


def _absence(machine: Machine) -> Evidence:
    return absence(machine, VENDOR, "TPU", "TPU among the functions of vendor 1ae0")


def _neither(machine: Machine, choice: Choice, facts: Sequence[Fact]) -> Evidence:
    """Return evidence without a TPU and without the client for tests."""
    missing = _absence(machine)
    asks = f"{SELECTOR}=CPU asks for {CPU_CLIENT}"
    lacks = f"no torch_xla fits {choice.torch}"
    reason = f"{missing.reason}; {asks}, but {lacks}"
    all_facts = (*missing.facts, *facts)
    return Evidence(False, reason, facts=all_facts)


def _generation(function: PciFunction) -> ChipGeneration | None:
    by_device = GENERATIONS.get((function.device, None))
    if by_device:
        return by_device
    return GENERATIONS.get((function.device, function.subsystem))


def _found(machine: Machine, function: PciFunction, index: int, choice: Choice) -> FoundDevice:
    generation = _generation(function) or ChipGeneration("?", 0)
    device = Device(
        name="Google TPU",
        capability=generation.name,
        memory=generation.memory * 2**30,
        pci_address=function.address,
        numa_node=function.numa_node,
        driver=function.driver,
    )
    only_vfio = bool(choice.package and choice.package.only_vfio)
    return FoundDevice(device, obstacle=_obstacle_of_chip(machine, function, index, only_vfio))


def _obstacle_of_chip(
    machine: Machine, function: PciFunction, index: int, only_vfio: bool
) -> Obstacle | None:
    """Return the obstacle to a chip.

    Chips from v5e on have the node ``/dev/vfio/<iommu group>``. Chips up to v4, and v5e with old
    images, have ``/dev/accel<index>``.
    """
    group = machine.link(f"{function.folder}/iommu_group")
    vfio_nodes = [f"/dev/vfio/{group}"] if group else []
    nodes = [node for node in (*vfio_nodes, f"/dev/accel{index}") if machine.exists(node)]
    if not nodes:
        return _without_node(function)
    node = nodes[0]
    if not machine.may_open(node):
        grant = f"grant read and write permission on {node}"
        return Obstacle(f"this user may not open {node}", grant)
    if only_vfio and node not in vfio_nodes:
        missing = "torch_tpu finds chips below /dev/vfio only"
        return Obstacle(missing, "use torch 2.9 with torch_xla 2.9")
    return None


def _without_node(function: PciFunction) -> Obstacle:
    if function.driver is None:
        image = "use a TPU VM image, which binds vfio-pci (from v5e) or its own driver (up to v4)"
        return Obstacle(f"{function.address} has no driver", image)
    in_container = "in a container: hand in /dev/vfio (from v5e) or /dev/accel* (up to v4)"
    return Obstacle(f"there is no device node for {function.address}", in_container)


def _visible(machine: Machine, count: int) -> tuple[int, ...]:
    """Return the positions that the first set variable leaves visible. Without one, return all."""
    variable = _visibility(machine)
    if variable is None:
        return tuple(range(count))
    parts = machine.environ[variable].split(",")
    chosen = {part.strip() for part in parts}
    return tuple(index for index in range(count) if str(index) in chosen)


def _visibility(machine: Machine) -> str | None:
    """Return the first variable with a value. An empty one counts as not set."""
    for name in VISIBILITY_VARIABLES:
        if machine.environ.get(name):
            return name
    return None


def _all_hidden(machine: Machine, visible: Sequence[int]) -> Obstacle | None:
    variable = _visibility(machine)
    if visible or variable is None:
        return None
    hides = f"{variable}={machine.environ[variable]!r} hides all of them"
    return Obstacle(hides, f"unset {variable}, or list chips that exist")


def _no_runtime(machine: Machine, choice: Choice) -> Obstacle | None:
    if choice.package is None:
        return Obstacle(f"no runtime package fits {choice.torch}", choice.remedy)
    wanted = machine.environ.get(SELECTOR, "")
    # "TPU_C_API" names the same device. torch_tpu ignores the variable.
    is_tpu = wanted.split("_")[0].upper() == "TPU"
    if wanted and not is_tpu and choice.package.xla_clients:
        asks = f"{SELECTOR}={wanted} asks for another device"
        return Obstacle(asks, f"unset {SELECTOR}, or set it to TPU")
    has_library = machine.environ.get("TPU_LIBRARY_PATH")
    if not has_library and machine.version_of("libtpu") is None:
        name = f"{choice.package.name} {choice.version}"
        missing = f"{name} needs libtpu, which is not installed"
        return Obstacle(missing, f"pip install the libtpu that {name} asks for")
    return None


def _summary_of_chips(
    found: Sequence[FoundDevice], within_reach: Sequence[FoundDevice], choice: Choice
) -> str:
    name = f"TPU {found[0].device.capability}"
    text = counted_usable(within_reach, found, f"{name} chip")
    if choice.package is None:
        return text
    return f"{text}, through {choice.package.name} {choice.version}"


def _facts(machine: Machine, found: Sequence[FoundDevice]) -> list[Fact]:
    facts = []
    for name in (*VISIBILITY_VARIABLES, SELECTOR):
        value = machine.environ.get(name)
        if value:
            facts.append(Fact(name, value))
    return facts + obstacle_facts(found)
