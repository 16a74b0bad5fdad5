"""Finding the device. Imports no torch: ``opgraft detect`` runs this in a child process on machines of all kinds."""

from __future__ import annotations

import json

from opgraft import Device, Evidence, Fact, Machine, PlatformSpec

VARIABLE = "TOY_NPU_DEVICE"


def probe(machine: Machine) -> Evidence:
    """Look for a toy NPU: a pure function of the machine's environment and files, which never raises."""
    path = machine.environ.get(VARIABLE)
    if not path:
        return Evidence(False, f"no device: {VARIABLE} is not set")
    facts = (Fact(VARIABLE, path),)
    text = machine.read(path)
    if text is None:
        return Evidence(
            False,
            f"no device: {VARIABLE} must be the absolute path of a readable file",
            facts=facts,
        )
    try:
        description = json.loads(text)
        device = Device(str(description["model"]), "t1", int(description["memory_mib"]) * 2**20)
    except (ValueError, KeyError, TypeError) as error:
        return Evidence(False, f"the device file is damaged: {error!r}", facts=facts)
    return Evidence(
        True, f"1 device: {device.name}", (device,), (*facts, Fact(path, f"model {device.name}"))
    )


SPEC = PlatformSpec(probe=probe, platform_class="opgraft_toy_npu.platform:ToyNpuPlatform")
