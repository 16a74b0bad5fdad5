"""The probe for TPU chips, which reads their PCI functions and device nodes.

Ids, memory and nodes: tpu_info/device.py of AI-Hypercomputer/cloud-accelerator-diagnostics, torch_xla 2.9
(_internal/tpu.py) and torch_tpu 0.2.0 (_internal/utils/hardware.py). Google's other PCI functions, such as network
cards, share the vendor's id, hence the table of device ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opgraft.machine.evidence import Device, Evidence, Fact
from opgraft.machine.machine import Machine
from opgraft.platforms.obstacles import FoundDevice, Obstacle, counted, hide, usable, verdict
from opgraft.platforms.pci import PciFunction, absence, pci_functions
from opgraft.platforms.tpu.packages import Choice, choose

VENDOR = 0x1AE0
VISIBILITY_VARIABLES = ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES")
SELECTOR = "PJRT_DEVICE"
CPU_CLIENT = "XLA's CPU client, for tests"


@dataclass(frozen=True)
class Generation:
    """``memory`` is the GiB of a chip, from the pages cloud.google.com/tpu/docs/{v2,v3,v4,v5e,v5p,v6e,tpu7x}."""

    name: str
    memory: int


GENERATIONS = {
    (0x0027, 0x004E): Generation(
        "v2", 16
    ),  # v2 and v3 share a device id; the subsystem tells them apart
    (0x0027, 0x004F): Generation("v3", 32),
    (0x005E, None): Generation("v4", 32),
    (0x0062, None): Generation("v5p", 95),
    (0x0063, None): Generation("v5e", 16),
    (0x006F, None): Generation("v6e", 32),
    (0x0076, None): Generation("v7x", 192),
}


def probe(machine: Machine) -> Evidence:
    """Give evidence for TPUs.

    With torch_xla, PJRT_DEVICE=CPU makes the platform available on any machine, on XLA's CPU client,
    so that programs can be tested without a chip. Nobody else sets that variable. In an automatic
    choice, the platform then comes before the CPU platform and after the platforms of GPUs.
    """
    functions = [function for function in pci_functions(machine, VENDOR) if _generation(function)]
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
    """Give evidence without a TPU and without the client for tests."""
    missing = _absence(machine)
    asks = f"{SELECTOR}=CPU asks for {CPU_CLIENT}"
    lacks = f"no torch_xla fits {choice.torch}"
    reason = f"{missing.reason}; {asks}, but {lacks}"
    all_facts = (*missing.facts, *facts)
    return Evidence(False, reason, facts=all_facts)


def _generation(function: PciFunction) -> Generation | None:
    return GENERATIONS.get((function.device, None)) or GENERATIONS.get(
        (function.device, function.subsystem)
    )


def _found(machine: Machine, function: PciFunction, index: int, choice: Choice) -> FoundDevice:
    generation = _generation(function) or Generation("?", 0)
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
    """Look at ``/dev/vfio/<iommu group>`` (chips from v5e on) and ``/dev/accel<index>`` (up to v4; old v5e images)."""
    group = machine.link(f"{function.folder}/iommu_group")
    nodes = [f"/dev/vfio/{group}"] if group else []
    node = next((node for node in (*nodes, f"/dev/accel{index}") if machine.exists(node)), None)
    if node is None:
        if function.driver is None:
            remedy = (
                "use a TPU VM image, which binds vfio-pci (from v5e) or its own driver (up to v4)"
            )
            return Obstacle(f"{function.address} has no driver", remedy)
        remedy = "in a container: hand in /dev/vfio (from v5e) or /dev/accel* (up to v4)"
        return Obstacle(f"there is no device node for {function.address}", remedy)
    if not machine.may_open(node):
        return Obstacle(
            f"this user may not open {node}", f"grant read and write permission on {node}"
        )
    if only_vfio and node not in nodes:
        return Obstacle(
            "torch_tpu finds chips below /dev/vfio only", "use torch 2.9 with torch_xla 2.9"
        )
    return None


def _visible(machine: Machine, count: int) -> tuple[int, ...]:
    """Return the positions that the first of the variables leaves visible; empty or not set, all."""
    variable = _visibility(machine)
    chosen = {part.strip() for part in machine.environ[variable].split(",")} if variable else None
    return tuple(index for index in range(count) if chosen is None or str(index) in chosen)


def _visibility(machine: Machine) -> str | None:
    return next((name for name in VISIBILITY_VARIABLES if machine.environ.get(name)), None)


def _all_hidden(machine: Machine, visible: Sequence[int]) -> Obstacle | None:
    variable = _visibility(machine)
    if visible or variable is None:
        return None
    hides = f"{variable}={machine.environ[variable]!r} hides all of them"
    return Obstacle(hides, f"unset {variable}, or list chips that exist")


def _no_runtime(machine: Machine, choice: Choice) -> Obstacle | None:
    if choice.package is None:
        return Obstacle(f"no runtime package fits {choice.torch}", choice.remedy)
    wanted = machine.environ.get(SELECTOR, "") if choice.package.xla_clients else ""
    if wanted and wanted.split("_")[0].upper() != "TPU":
        return Obstacle(
            f"{SELECTOR}={wanted} asks for another device", f"unset {SELECTOR}, or set it to TPU"
        )
    if machine.version_of("libtpu") is None and not machine.environ.get("TPU_LIBRARY_PATH"):
        name = f"{choice.package.name} {choice.version}"
        return Obstacle(
            f"{name} needs libtpu, which is not installed",
            f"pip install the libtpu that {name} asks for",
        )
    return None


def _summary_of_chips(
    found: Sequence[FoundDevice], within_reach: Sequence[FoundDevice], choice: Choice
) -> str:
    name = f"TPU {found[0].device.capability}"
    some = f"{len(within_reach)} of {len(found)} {name} chips within reach"
    text = some if len(within_reach) < len(found) else counted(len(found), f"{name} chip")
    return f"{text}, through {choice.package.name} {choice.version}" if choice.package else text


def _facts(machine: Machine, found: Sequence[FoundDevice]) -> list[Fact]:
    names = (*VISIBILITY_VARIABLES, SELECTOR)
    facts = [Fact(name, machine.environ[name]) for name in names if machine.environ.get(name)]
    return facts + [
        Fact(one.device.pci_address or "", one.obstacle.missing) for one in found if one.obstacle
    ]
