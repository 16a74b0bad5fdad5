"""The probe for AMD GPUs and for obstacles to ROCm."""

from __future__ import annotations

from opgraft.machine.evidence import Device, Evidence, Fact
from opgraft.machine.machine import Machine
from opgraft.platforms.obstacles import (
    FoundDevice,
    Obstacle,
    counted,
    counted_usable,
    hide,
    obstacle_facts,
    torch_obstacle,
    usable,
    verdict,
)
from opgraft.platforms.pci import PciFunction, absence
from opgraft.platforms.rocm.kfd import NODES, VENDOR, Node, gpu_functions, gpu_nodes, model, refused
from opgraft.platforms.visibility import chosen

COMPUTE_NODE = "/dev/kfd"
DRIVER = "amdgpu"
LOWER_VARIABLE = "ROCR_VISIBLE_DEVICES"
UPPER_VARIABLES = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""The first set variable counts."""

_INSTALL = (
    "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/rocm6.4"
)
_CONTAINER = "in a container: start it with --device /dev/kfd --device /dev/dri"


def probe(machine: Machine) -> Evidence:
    """Return evidence for ROCm from PCI ids and the kernel's topology of compute devices."""
    nodes = list(gpu_nodes(machine))
    served = {node.function for node in nodes}
    found = [_of_node(machine, node) for node in nodes]
    for function in gpu_functions(machine):
        if function not in served:
            found.append(_without_node(machine, function))
    if not found:
        looked_for = "display controller or accelerator of vendor 1002"
        return absence(machine, VENDOR, "AMD GPU", looked_for)
    within_reach = usable(found)
    visible = _visible(machine, within_reach)
    obstacles = (
        within_reach[0].obstacle,
        _all_hidden(machine, visible),
        torch_obstacle(machine, "hip", _INSTALL),
    )
    devices = hide([one.device for one in within_reach], visible)
    summary = _summary_of_gpus(found, within_reach)
    return verdict(summary, devices, obstacles, _facts(machine, found))


def visible_count(evidence: Evidence) -> int:
    """Return the number of devices for this process."""
    return sum(not device.hidden for device in evidence.devices)


def _of_node(machine: Machine, node: Node) -> FoundDevice:
    text = machine.read(f"/sys/module/{DRIVER}/version") or ""
    # A driver of the kernel itself has no version.
    version = text[:40].strip()
    function = node.function
    device = Device(
        name=model(machine, node.properties.get("device_id", 0), function),
        capability=node.target,
        memory=node.memory,
        pci_address=function.address if function else None,
        numa_node=function.numa_node if function else None,
        driver=f"{DRIVER} {version}".strip(),
    )
    obstacle = _node_obstacle(machine, COMPUTE_NODE) or _node_obstacle(machine, node.render_node)
    identities = (node.uuid,) if node.uuid else ()
    return FoundDevice(device, identities, obstacle)


def _without_node(machine: Machine, function: PciFunction) -> FoundDevice:
    """Return a GPU outside of the topology, with the obstacle."""
    device = Device(
        name=model(machine, function.device, function),
        pci_address=function.address,
        numa_node=function.numa_node,
        driver=function.driver,
    )
    return FoundDevice(device, obstacle=_obstacle_without_node(machine, function))


def _obstacle_without_node(machine: Machine, function: PciFunction) -> Obstacle:
    # A container is refused the files of other GPUs.
    if function.driver == DRIVER and refused(machine):
        return Obstacle(f"the files of {NODES} may not be read", _CONTAINER)
    if function.driver == DRIVER:
        missing = f"the driver offers no compute device ({NODES})"
    elif function.driver is None:
        missing = f"the driver {DRIVER} is not loaded"
    else:
        missing = f"the driver is {function.driver}"
    guide = "https://rocm.docs.amd.com/projects/install-on-linux"
    return Obstacle(missing, f"load {DRIVER} (modprobe {DRIVER}), or install it ({guide})")


def _node_obstacle(machine: Machine, node: str) -> Obstacle | None:
    if not machine.exists(node):
        return Obstacle(f"there is no device node {node}", _CONTAINER)
    if not machine.may_open(node):
        group = f"join the group that may (ls -l {node}; often render and video)"
        return Obstacle(f"this user may not open {node}", f"{group}, then log in again")
    return None


def _visible(machine: Machine, found: list[FoundDevice]) -> tuple[int, ...]:
    """Return the visible positions. HIP chooses among the devices that ROCr leaves visible."""
    positions = tuple(range(len(found)))
    lower = machine.environ.get(LOWER_VARIABLE)
    if lower is not None:
        positions = chosen(lower, [one.identities for one in found])
    upper = _upper(machine)
    if upper is not None:
        # HIP numbers the devices that ROCr has left.
        left = [found[position].identities for position in positions]
        indices = chosen(machine.environ[upper], left)
        positions = tuple(positions[index] for index in indices)
    return positions


def _upper(machine: Machine) -> str | None:
    """Return the variable that HIP reads, if one is set. An empty value counts."""
    for name in UPPER_VARIABLES:
        if name in machine.environ:
            return name
    return None


def _all_hidden(machine: Machine, visible: tuple[int, ...]) -> Obstacle | None:
    """Return the obstacle if variables hide all devices. The set variables are named."""
    if visible:
        return None
    names = []
    for name in (LOWER_VARIABLE, _upper(machine)):
        if name and name in machine.environ:
            names.append(name)
    values = [f"{name}={machine.environ[name]!r}" for name in names]
    hides = " and ".join(values)
    unset = " and ".join(names)
    return Obstacle(f"{hides} hides all of them", f"unset {unset}, or name devices that exist")


def _summary_of_gpus(found: list[FoundDevice], within_reach: list[FoundDevice]) -> str:
    """Return the number of GPUs in words, or of GPUs and partitions."""
    cards = {one.device.pci_address for one in found}
    # Without addresses, nothing tells the partitions of one card.
    has_whole_cards = None in cards or len(cards) == len(found)
    if has_whole_cards or len(within_reach) < len(found):
        return counted_usable(within_reach, found, "AMD GPU")
    text = counted(len(cards), "AMD GPU")
    return f"{text} in {len(found)} partitions"


def _facts(machine: Machine, found: list[FoundDevice]) -> list[Fact]:
    number = len(machine.names(NODES))
    facts = [Fact(NODES, f"{number} nodes")]
    unread = refused(machine)
    if unread:
        listed = ", ".join(unread)
        facts.append(Fact(NODES, f"not readable, so not given to this container: {listed}"))
    for name in (LOWER_VARIABLE, *UPPER_VARIABLES):
        if name in machine.environ:
            facts.append(Fact(name, machine.environ[name]))
    return facts + obstacle_facts(found)
