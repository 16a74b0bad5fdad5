"""Find the device.

``opgraft detect`` runs the probe on machines of all kinds. So this module imports neither torch
nor jax.
"""

from __future__ import annotations

import re

from opgraft import Device, Evidence, Fact, Machine, PlatformSpec

VARIABLE = "JAX_RUNTIME_DEVICE"
"""The environment variable that asks for the platform: ``cpu`` or ``tpu``.

A plugin's platform comes before the built-in ones. Without the variable, this one would replace
the CPU on every machine with the plugin.
"""

_RUNTIME = ("jax", "jaxlib")


def probe(machine: Machine) -> Evidence:
    """Return JAX's device, or the reason for its absence.

    The result depends on the machine's environment, files and packages only. A probe never raises.
    """
    facts: tuple[Fact, ...] = ()
    versions = {package: machine.version_of(package) for package in _RUNTIME}
    for name, version in versions.items():
        facts = (*facts, Fact(f"package {name}", version or "not installed"))
    for name, version in versions.items():
        if version is None:
            remedy = "pip install jax, for TPUs 'jax[tpu]'"
            return _absent(f"{name} is not installed", remedy, facts)
        if not version.startswith("0.10."):
            reason = f"{name} {version} is installed, and this plugin is for 0.10"
            return _absent(reason, "pip install 'jax>=0.10,<0.11'", facts)
    wanted = machine.environ.get(VARIABLE, "")
    facts = (*facts, Fact(VARIABLE, wanted or "not set"))
    if wanted == "cpu":
        device = Device("CPU, by XLA")
        return Evidence(True, f"{VARIABLE}=cpu: XLA for the CPU", (device,), facts)
    if wanted == "tpu":
        return _tpu(machine, facts)
    remedy = f"set {VARIABLE} to cpu or tpu"
    if wanted:
        return _absent(f"{VARIABLE}={wanted!r} is no device that this plugin knows", remedy, facts)
    return _absent(f"not asked for: {VARIABLE} is not set", remedy, facts)


def _absent(reason: str, remedy: str, facts: tuple[Fact, ...]) -> Evidence:
    return Evidence(False, reason, (), facts, remedy)


def _tpu(machine: Machine, facts: tuple[Fact, ...]) -> Evidence:
    """Return the first TPU chip, or the reason for its absence."""
    if machine.version_of("libtpu") is None:
        reason = f"{VARIABLE}=tpu, and libtpu is not installed"
        return _absent(reason, "pip install 'jax[tpu]'", facts)
    nodes = [f"/dev/{name}" for name in machine.names("/dev") if re.fullmatch(r"accel\d+", name)]
    nodes += [f"/dev/vfio/{name}" for name in machine.names("/dev/vfio") if name.isdecimal()]
    if not nodes:
        reason = f"{VARIABLE}=tpu, and there is no device node of a chip"
        remedy = "in a container: hand in /dev/vfio (from v5e) or /dev/accel*"
        return _absent(reason, remedy, facts)
    device = Device("TPU, by JAX")
    facts = (*facts, Fact(nodes[0], "there"))
    return Evidence(True, f"{VARIABLE}=tpu: the first chip", (device,), facts)


SPEC = PlatformSpec(probe=probe, platform_class="opgraft_jax.platform:JaxPlatform")
