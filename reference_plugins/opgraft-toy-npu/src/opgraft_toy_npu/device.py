"""Find the device.

``opgraft detect`` runs the probe in a child process, on machines of all kinds. So this module
imports no torch.
"""

from __future__ import annotations

import json

from opgraft import Device, Evidence, Fact, Machine, PlatformSpec

VARIABLE = "TOY_NPU_DEVICE"


def probe(machine: Machine) -> Evidence:
    """Return the toy NPU of a machine, or the reason for its absence.

    The result depends on the machine's environment and files only. A probe never raises.
    """
    path = machine.environ.get(VARIABLE)
    if not path:
        return Evidence(False, f"no device: {VARIABLE} is not set")

    setting = Fact(VARIABLE, path)
    text = machine.read(path)
    if text is None:
        reason = f"no device: {VARIABLE} must be the absolute path of a readable file"
        return Evidence(False, reason, facts=(setting,))

    try:
        device = _device_of(text)
    except (ValueError, KeyError, TypeError) as error:
        reason = f"the device file is damaged: {error!r}"
        return Evidence(False, reason, facts=(setting,))

    model = Fact(path, f"model {device.name}")
    return Evidence(True, f"1 device: {device.name}", (device,), (setting, model))


def _device_of(text: str) -> Device:
    description = json.loads(text)
    # A driver reports mebibytes, opgraft counts bytes.
    memory = int(description["memory_mib"]) * 2**20
    return Device(str(description["model"]), "t1", memory)


SPEC = PlatformSpec(probe=probe, platform_class="opgraft_toy_npu.platform:ToyNpuPlatform")
