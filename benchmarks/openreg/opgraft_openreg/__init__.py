"""Find ``torch_openreg``, torch's own example of a device.

A folder of torch's repository has the example. ``make test-openreg`` builds it.
"""

from __future__ import annotations

from opgraft import Device, Evidence, Fact, Machine, PlatformSpec

EXAMPLE = "torch_openreg"
DEVICES = (Device("OpenReg"),) * 2
"""The example simulates two devices."""


def probe(machine: Machine) -> Evidence:
    """Return the simulated devices if the example is installed."""
    version = machine.version_of(EXAMPLE)
    if version is None:
        return Evidence(False, f"no device: {EXAMPLE} is not installed")
    fact = Fact(EXAMPLE, version)
    return Evidence(True, f"{len(DEVICES)} simulated devices", DEVICES, (fact,))


SPEC = PlatformSpec(probe=probe, platform_class="opgraft_openreg.platform:OpenRegPlatform")
