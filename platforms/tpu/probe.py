"""Which TPU chips there are, read from their PCI functions and device nodes.

Ids, memory and nodes: tpu_info/device.py of AI-Hypercomputer/cloud-accelerator-diagnostics, torch_xla 2.9
(_internal/tpu.py) and torch_tpu 0.2.0 (_internal/utils/hardware.py). Google's other PCI functions, such as network
cards, share the vendor's id, hence the table of device ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from opgraft.evidence import Device, Evidence, Fact
from opgraft.machine import Machine
from opgraft.platforms.pci import PciFunction, pci_functions
from opgraft.platforms.tpu.packages import Choice, choose

VENDOR = 0x1AE0
VISIBILITY_VARIABLES = ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES")
CPU_CLIENT = "XLA's CPU client, for tests"


@dataclass(frozen=True)
class Generation:
    """``memory`` is the GiB of a chip, from the pages cloud.google.com/tpu/docs/{v2,v3,v4,v5e,v5p,v6e,tpu7x}."""

    name: str
    memory: int


GENERATIONS = {
    (0x0027, 0x004E): Generation("v2", 16),  # v2 and v3 share a device id; the subsystem tells them apart
    (0x0027, 0x004F): Generation("v3", 32),
    (0x005E, None): Generation("v4", 32),
    (0x0062, None): Generation("v5p", 95),
    (0x0063, None): Generation("v5e", 16),
    (0x006F, None): Generation("v6e", 32),
    (0x0076, None): Generation("v7x", 192),
}


@dataclass(frozen=True)
class _Chip:
    """A chip with its device node: ``None`` where there is none."""

    device: Device
    node: str | None
    may_open: bool


def probe(machine: Machine) -> Evidence:
    """Evidence for TPUs.

    With torch_xla, PJRT_DEVICE=CPU makes the platform available on any machine, on XLA's CPU client, so that programs
    can be tested without a chip. Nobody else sets that variable, so to set it is to ask for it; the platform then comes
    before the CPU platform in an automatic choice, and after the platforms of GPUs.
    """
    functions = [function for function in pci_functions(machine, VENDOR) if _generation(function)]
    wants_cpu = machine.environ.get("PJRT_DEVICE", "").upper() == "CPU"
    if not functions and not wants_cpu:
        return Evidence(False, "no TPU among the PCI functions")
    choice = choose(machine)
    chips = _chips(machine, functions)
    devices = tuple(chip.device for chip in chips)
    facts = (*_facts(machine, chips), *choice.facts)
    if choice.package and choice.package.selector and wants_cpu:
        return Evidence(True, f"{choice.package.selector}=CPU: {CPU_CLIENT}", devices, facts)
    if not chips:
        return Evidence(False, "no TPU among the PCI functions, and no torch_xla for PJRT_DEVICE=CPU", (), facts)
    obstacle = _no_usable_chip(chips, choice) or _no_runtime(machine, choice)
    if obstacle:
        reason, remedy = obstacle
        return Evidence(False, f"{_counted(devices)}, but {reason}", devices, facts, remedy)
    usable = tuple(chip.device for chip in _usable(chips, choice))
    package = f"through {choice.package.name} {choice.version}" if choice.package else ""
    of_all = "" if len(usable) == len(devices) else f" of {len(devices)}"
    return Evidence(True, f"{_counted(usable, of_all)} {package}", devices, facts)


def _generation(function: PciFunction) -> Generation | None:
    for subsystem in (None, function.subsystem):
        if (function.device, subsystem) in GENERATIONS:
            return GENERATIONS[function.device, subsystem]
    return None


def _chips(machine: Machine, functions: Iterable[PciFunction]) -> list[_Chip]:
    visible = _visible(machine)
    chips = []
    for index, function in enumerate(functions):
        generation = _generation(function) or Generation("?", 0)
        device = Device(
            name=f"TPU {generation.name}",
            capability=generation.name,
            memory=generation.memory * 2**30,
            pci_address=function.address,
            numa_node=function.numa_node,
            driver=function.driver,
            hidden=visible is not None and str(index) not in visible,
        )
        node = _node(machine, function, index)
        chips.append(_Chip(device, node, node is not None and machine.may_open(node)))
    return chips


def _visible(machine: Machine) -> set[str] | None:
    """The chips that a variable leaves visible, by their index among all; ``None`` where no variable says so."""
    values = (machine.environ.get(name) for name in VISIBILITY_VARIABLES)
    chosen = next((value for value in values if value), None)
    return {part.strip() for part in chosen.split(",")} if chosen else None


def _node(machine: Machine, function: PciFunction, index: int) -> str | None:
    """``/dev/vfio/<iommu group>`` from v5e on, ``/dev/accel<index>`` up to v4 and on early images of v5e."""
    group = machine.link(f"{function.folder}/iommu_group")
    nodes = [f"/dev/vfio/{group}"] if group else []
    return next((node for node in (*nodes, f"/dev/accel{index}") if machine.exists(node)), None)


def _facts(machine: Machine, chips: Sequence[_Chip]) -> Iterable[Fact]:
    for name in (*VISIBILITY_VARIABLES, "PJRT_DEVICE"):
        if machine.environ.get(name):
            yield Fact(name, machine.environ[name])
    nodes = [chip.node for chip in chips if chip.node]
    if nodes:
        yield Fact("device nodes", " ".join(nodes))


def _usable(chips: Iterable[_Chip], choice: Choice) -> list[_Chip]:
    only_vfio = bool(choice.package and choice.package.only_vfio)
    return [c for c in chips if c.node and c.may_open and not c.device.hidden and not (only_vfio and _is_accel(c.node))]


def _is_accel(node: str) -> bool:
    return node.startswith("/dev/accel")


def _no_usable_chip(chips: Sequence[_Chip], choice: Choice) -> tuple[str, str] | None:
    """Why none of the chips can be used, and what to do about it; ``None`` where one can."""
    if _usable(chips, choice):
        return None
    nodes = [chip.node for chip in chips if chip.node]
    if not nodes:
        if not any(chip.device.driver for chip in chips):
            return "no driver is bound to them", "bind vfio-pci, or load the TPU driver of the image (up to v4)"
        return "they have no device node", "in a container, hand in /dev/vfio (from v5e) or /dev/accel* (up to v4)"
    if not any(chip.may_open for chip in chips):
        return f"this user may not open {nodes[0]}", f"grant read and write permission on {' '.join(nodes)}"
    if all(chip.device.hidden for chip in chips if chip.may_open):
        return f"all are hidden by {' or '.join(VISIBILITY_VARIABLES)}", "unset it, or list the chips to use"
    name = choice.package.name if choice.package else "the runtime"
    return f"{name} finds chips below /dev/vfio only", "use an image that binds the chips to vfio-pci, or torch_xla 2.9"


def _no_runtime(machine: Machine, choice: Choice) -> tuple[str, str] | None:
    if choice.package is None:
        return "no runtime package fits the installed torch", choice.remedy
    if choice.package.selector:
        wanted = machine.environ.get(choice.package.selector, "")
        if wanted and wanted.split("_")[0].upper() != "TPU":
            return f"{choice.package.selector}={wanted} asks for another device", f"unset {choice.package.selector}"
    if machine.version_of("libtpu") is None and not machine.environ.get("TPU_LIBRARY_PATH"):
        name = f"{choice.package.name} {choice.version}"
        return f"{name} needs libtpu, which is not installed", f"pip install libtpu in the version that {name} asks for"
    return None


def _counted(devices: Sequence[Device], of_all: str = "") -> str:
    names = " and ".join(dict.fromkeys(device.name for device in devices))
    return f"{len(devices)}{of_all} x {names}"
