"""The probe for NVIDIA GPUs, and for what keeps CUDA from using them."""

from __future__ import annotations

from dataclasses import replace

from opgraft.machine.evidence import Evidence, Fact
from opgraft.machine.machine import Machine
from opgraft.platforms.cuda import gpus
from opgraft.platforms.cuda.integrated import RELEASE, jetson, under_wsl
from opgraft.platforms.cuda.nvml import with_detail
from opgraft.platforms.obstacles import (
    FoundDevice,
    Obstacle,
    counted,
    hide,
    torch_obstacle,
    usable,
    verdict,
)
from opgraft.platforms.pci import absence
from opgraft.platforms.visibility import chosen

VARIABLE = "CUDA_VISIBLE_DEVICES"
_INSTALL = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu128"
_INSTALL_JETSON = "install NVIDIA's build of torch for this JetPack (https://docs.nvidia.com/deeplearning/frameworks)"


def probe(machine: Machine) -> Evidence:
    """Give evidence for CUDA, from PCI ids and the files of NVIDIA's driver."""
    found = gpus.gpus(machine) or under_wsl(machine) or jetson(machine)
    if not found:
        return absence(machine, gpus.VENDOR, "NVIDIA GPU", "display controller of vendor 10de")
    within_reach = usable(found)
    devices, detail = with_detail(machine, [one.device for one in within_reach])
    if len(devices) == len(within_reach):
        within_reach = [
            replace(one, device=device) for one, device in zip(within_reach, devices, strict=True)
        ]
    else:  # the Windows host has more GPUs than its one device node shows
        within_reach = [replace(within_reach[0], device=device) for device in devices]
    units = [unit for one in within_reach for unit in gpus.partitions(machine, one)]
    visible = _visible(machine, units)
    install = _INSTALL_JETSON if machine.exists(RELEASE) else _INSTALL
    return verdict(
        _summary_of_gpus(found, within_reach, units),
        hide([unit.device for unit in units], visible),
        (
            within_reach[0].obstacle,
            _all_hidden(machine, visible),
            torch_obstacle(machine, "cuda", install),
        ),
        (*_facts(machine, found), *detail),
    )


def visible_count(evidence: Evidence) -> int:
    """Count the devices that CUDA offers this process; of MIG devices, never more than one."""
    visible = [device for device in evidence.devices if not device.hidden]
    return (
        min(1, len(visible))
        if any(device.name.endswith(gpus.MIG) for device in visible)
        else len(visible)
    )


def _visible(machine: Machine, units: list[FoundDevice]) -> tuple[int, ...]:
    """Return the positions that the variable leaves visible; CUDA numbers equal GPUs by address, as the files do."""
    value = machine.environ.get(VARIABLE)
    if value is None:
        return tuple(range(len(units)))
    # No file says whose UUID it is.
    if value.startswith("MIG-") and not value.startswith("MIG-GPU-"):
        return tuple(
            index for index, unit in enumerate(units) if unit.device.name.endswith(gpus.MIG)
        )
    return chosen(value, [unit.identities for unit in units])


def _all_hidden(machine: Machine, visible: tuple[int, ...]) -> Obstacle | None:
    if visible:
        return None
    value = machine.environ.get(VARIABLE)
    return Obstacle(
        f"{VARIABLE}={value!r} hides all of them", f"unset {VARIABLE}, or name devices that exist"
    )


def _summary_of_gpus(
    found: list[FoundDevice], within_reach: list[FoundDevice], units: list[FoundDevice]
) -> str:
    some = f"{len(within_reach)} of {len(found)} NVIDIA GPUs within reach"
    text = some if len(within_reach) < len(found) else counted(len(within_reach), "NVIDIA GPU")
    parts = [unit for unit in units if unit.device.name.endswith(gpus.MIG)]
    return f"{text} with {counted(len(parts), 'MIG device')}" if parts else text


def _facts(machine: Machine, found: list[FoundDevice]) -> list[Fact]:
    facts = [Fact(f"{gpus.DRIVER}/version", gpus.driver_version(machine) or "not there")]
    if VARIABLE in machine.environ:
        facts.append(Fact(VARIABLE, machine.environ[VARIABLE]))
    facts += [
        Fact(one.device.pci_address or one.device.name, one.obstacle.missing)
        for one in found
        if one.obstacle
    ]
    return facts
