"""The probe for AMD GPUs, and for what keeps ROCm from using them."""

from __future__ import annotations

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
from opgraft.platforms.pci import PciFunction, absence
from opgraft.platforms.rocm.kfd import NODES, VENDOR, Node, gpu_functions, gpu_nodes, model, refused
from opgraft.platforms.visibility import chosen

COMPUTE_NODE = "/dev/kfd"
DRIVER = "amdgpu"
LOWER_VARIABLE = "ROCR_VISIBLE_DEVICES"
UPPER_VARIABLES = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")  # the first that is set counts
_INSTALL = (
    "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/rocm6.4"
)
_CONTAINER = "in a container: start it with --device /dev/kfd --device /dev/dri"


def probe(machine: Machine) -> Evidence:
    """Give evidence for ROCm, from PCI ids and the kernel's topology of compute devices."""
    nodes = list(gpu_nodes(machine))
    served = {node.function for node in nodes}
    found = [_of_node(machine, node) for node in nodes]
    found += [
        _without_node(machine, function)
        for function in gpu_functions(machine)
        if function not in served
    ]
    if not found:
        return absence(
            machine, VENDOR, "AMD GPU", "display controller or accelerator of vendor 1002"
        )
    within_reach = usable(found)
    visible = _visible(machine, within_reach)
    return verdict(
        _summary_of_gpus(found, within_reach),
        hide([one.device for one in within_reach], visible),
        (
            within_reach[0].obstacle,
            _all_hidden(machine, visible),
            torch_obstacle(machine, "hip", _INSTALL),
        ),
        _facts(machine, found),
    )


def visible_count(evidence: Evidence) -> int:
    """Count the devices that ROCm offers this process."""
    return sum(not device.hidden for device in evidence.devices)


def _of_node(machine: Machine, node: Node) -> FoundDevice:
    version = (machine.read(f"/sys/module/{DRIVER}/version") or "")[:40].strip()
    device = Device(
        name=model(machine, node.properties.get("device_id", 0), node.function),
        capability=node.target,
        memory=node.memory,
        pci_address=node.function.address if node.function else None,
        numa_node=node.function.numa_node if node.function else None,
        driver=f"{DRIVER} {version}".strip(),
    )
    obstacle = _node_obstacle(machine, COMPUTE_NODE) or _node_obstacle(machine, node.render_node)
    return FoundDevice(device, (node.uuid,) if node.uuid else (), obstacle)


def _without_node(machine: Machine, function: PciFunction) -> FoundDevice:
    """Return a GPU that PCI shows and the topology does not, with the obstacle."""
    device = Device(
        name=model(machine, function.device, function),
        pci_address=function.address,
        numa_node=function.numa_node,
        driver=function.driver,
    )
    if function.driver == DRIVER and refused(machine):
        return FoundDevice(
            device, obstacle=Obstacle(f"the files of {NODES} may not be read", _CONTAINER)
        )
    missing = (
        f"the driver {DRIVER} is not loaded"
        if function.driver is None
        else f"the driver is {function.driver}"
    )
    if function.driver == DRIVER:
        missing = f"the driver offers no compute device ({NODES})"
    remedy = f"load {DRIVER} (modprobe {DRIVER}), or install it (https://rocm.docs.amd.com/projects/install-on-linux)"
    return FoundDevice(device, obstacle=Obstacle(missing, remedy))


def _node_obstacle(machine: Machine, node: str) -> Obstacle | None:
    if not machine.exists(node):
        return Obstacle(f"there is no device node {node}", _CONTAINER)
    if not machine.may_open(node):
        remedy = (
            f"join the group that may (ls -l {node}; often render and video), then log in again"
        )
        return Obstacle(f"this user may not open {node}", remedy)
    return None


def _visible(machine: Machine, found: list[FoundDevice]) -> tuple[int, ...]:
    """Return the positions that are left visible: HIP chooses among those that the runtime below it (ROCr) leaves."""
    positions = tuple(range(len(found)))
    lower = machine.environ.get(LOWER_VARIABLE)
    if lower is not None:
        positions = chosen(lower, [one.identities for one in found])
    upper = _upper(machine)
    if upper is not None:
        value = machine.environ[upper]
        positions = tuple(
            positions[index] for index in chosen(value, [found[at].identities for at in positions])
        )
    return positions


def _upper(machine: Machine) -> str | None:
    return next((name for name in UPPER_VARIABLES if name in machine.environ), None)


def _all_hidden(machine: Machine, visible: tuple[int, ...]) -> Obstacle | None:
    if visible:
        return None
    names = [name for name in (LOWER_VARIABLE, _upper(machine)) if name and name in machine.environ]
    values = " and ".join(f"{name}={machine.environ[name]!r}" for name in names)
    return Obstacle(
        f"{values} hides all of them", f"unset {' and '.join(names)}, or name devices that exist"
    )


def _summary_of_gpus(found: list[FoundDevice], within_reach: list[FoundDevice]) -> str:
    if len(within_reach) < len(found):
        return f"{len(within_reach)} of {len(found)} AMD GPUs within reach"
    cards = {one.device.pci_address for one in found}
    if None in cards or len(cards) == len(found):
        return counted(len(found), "AMD GPU")
    return f"{counted(len(cards), 'AMD GPU')} in {len(found)} partitions"


def _facts(machine: Machine, found: list[FoundDevice]) -> list[Fact]:
    facts = [Fact(NODES, f"{len(machine.names(NODES))} nodes")]
    unread = refused(machine)
    if unread:
        facts.append(
            Fact(NODES, f"not readable, so not given to this container: {', '.join(unread)}")
        )
    facts += [
        Fact(name, machine.environ[name])
        for name in (LOWER_VARIABLE, *UPPER_VARIABLES)
        if name in machine.environ
    ]
    facts += [
        Fact(one.device.pci_address or one.device.name, one.obstacle.missing)
        for one in found
        if one.obstacle
    ]
    return facts
