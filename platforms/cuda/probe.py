"""The probe for NVIDIA GPUs and for obstacles to CUDA."""

from __future__ import annotations

from dataclasses import replace

from opgraft.machine.evidence import Device, Evidence, Fact
from opgraft.machine.machine import Machine
from opgraft.platforms.cuda import gpus
from opgraft.platforms.cuda.integrated import RELEASE, jetson, under_wsl
from opgraft.platforms.cuda.nvml import with_detail
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
from opgraft.platforms.pci import absence
from opgraft.platforms.visibility import chosen

VARIABLE = "CUDA_VISIBLE_DEVICES"
_INSTALL = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu128"
_INSTALL_JETSON = (
    "install NVIDIA's build of torch for this JetPack "
    "(https://docs.nvidia.com/deeplearning/frameworks)"
)


def probe(machine: Machine) -> Evidence:
    """Return evidence for CUDA from PCI ids and the files of NVIDIA's driver."""
    found = gpus.gpus(machine) or under_wsl(machine) or jetson(machine)
    if not found:
        return absence(machine, gpus.VENDOR, "NVIDIA GPU", "display controller of vendor 10de")
    within_reach, details = _with_details(machine, usable(found))
    units: list[FoundDevice] = []
    for one in within_reach:
        units += gpus.partitions(machine, one)
    visible = _visible(machine, units)
    install = _INSTALL_JETSON if machine.exists(RELEASE) else _INSTALL
    obstacles = (
        within_reach[0].obstacle,
        _all_hidden(machine, visible),
        torch_obstacle(machine, "cuda", install),
    )
    devices = hide([unit.device for unit in units], visible)
    facts = (*_facts(machine, found), *details)
    return verdict(_summary_of_gpus(found, within_reach, units), devices, obstacles, facts)


def _with_details(
    machine: Machine, found: list[FoundDevice]
) -> tuple[list[FoundDevice], tuple[Fact, ...]]:
    """Return the devices with details of NVIDIA's library, and a fact about the library."""
    devices, facts = with_detail(machine, [one.device for one in found])
    originals = found
    # The Windows host has more GPUs than its one device node shows.
    if len(devices) != len(found):
        originals = [found[0]] * len(devices)
    detailed = []
    for original, device in zip(originals, devices, strict=True):
        detailed.append(replace(original, device=device))
    return detailed, facts


def visible_count(evidence: Evidence) -> int:
    """Return the number of devices for this process. CUDA offers one MIG device at most."""
    visible = [device for device in evidence.devices if not device.hidden]
    if any(_is_mig(device) for device in visible):
        return 1
    return len(visible)


def _is_mig(device: Device) -> bool:
    return device.name.endswith(gpus.MIG)


def _visible(machine: Machine, units: list[FoundDevice]) -> tuple[int, ...]:
    """Return the visible positions. CUDA numbers equal GPUs by address, as the files do."""
    value = machine.environ.get(VARIABLE)
    if value is None:
        return tuple(range(len(units)))
    # No file tells the MIG device of such a UUID, so all of them count.
    if value.startswith("MIG-") and not value.startswith("MIG-GPU-"):
        places = range(len(units))
        return tuple(place for place in places if _is_mig(units[place].device))
    return chosen(value, [unit.identities for unit in units])


def _all_hidden(machine: Machine, visible: tuple[int, ...]) -> Obstacle | None:
    if visible:
        return None
    value = machine.environ.get(VARIABLE)
    hides = f"{VARIABLE}={value!r} hides all of them"
    return Obstacle(hides, f"unset {VARIABLE}, or name devices that exist")


def _summary_of_gpus(
    found: list[FoundDevice], within_reach: list[FoundDevice], units: list[FoundDevice]
) -> str:
    text = counted_usable(within_reach, found, "NVIDIA GPU")
    parts = [unit for unit in units if _is_mig(unit.device)]
    if not parts:
        return text
    return f"{text} with {counted(len(parts), 'MIG device')}"


def _facts(machine: Machine, found: list[FoundDevice]) -> list[Fact]:
    version = gpus.driver_version(machine) or "not there"
    facts = [Fact(f"{gpus.DRIVER}/version", version)]
    value = machine.environ.get(VARIABLE)
    # An empty value hides all devices, so it is a fact, too.
    if value is not None:
        facts.append(Fact(VARIABLE, value))
    return facts + obstacle_facts(found)
