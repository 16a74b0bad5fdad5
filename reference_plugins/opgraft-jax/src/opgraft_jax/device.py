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
    versions = {package: machine.version_of(package) for package in _RUNTIME}
    # All facts are collected first, so that a report names them all, whichever one is missing.
    facts = [
        Fact(f"package {name}", version or "not installed") for name, version in versions.items()
    ]
    for name, version in versions.items():
        if version is None:
            reason = f"{name} is not installed"
            remedy = "pip install jax, for TPUs 'jax[tpu]'"
            return _absent(reason, remedy, facts)
        if not version.startswith("0.10."):
            reason = f"{name} {version} is installed, and this plugin is for 0.10"
            remedy = "pip install 'jax>=0.10,<0.11'"
            return _absent(reason, remedy, facts)

    wanted = machine.environ.get(VARIABLE, "")
    facts.append(Fact(VARIABLE, wanted or "not set"))
    if wanted == "cpu":
        return _present("CPU, by XLA", f"{VARIABLE}=cpu: XLA for the CPU", facts)
    if wanted == "tpu":
        return _tpu(machine, facts)

    reason = f"not asked for: {VARIABLE} is not set"
    if wanted:
        reason = f"{VARIABLE}={wanted!r} is no device that this plugin knows"
    return _absent(reason, f"set {VARIABLE} to cpu or tpu", facts)


def _present(name: str, summary: str, facts: list[Fact]) -> Evidence:
    device = Device(name)
    return Evidence(True, summary, (device,), tuple(facts))


def _absent(reason: str, remedy: str, facts: list[Fact]) -> Evidence:
    return Evidence(False, reason, (), tuple(facts), remedy)


def _tpu(machine: Machine, facts: list[Fact]) -> Evidence:
    """Return the first TPU chip, or the reason for its absence."""
    if machine.version_of("libtpu") is None:
        reason = f"{VARIABLE}=tpu, and libtpu is not installed"
        remedy = "pip install 'jax[tpu]'"
        return _absent(reason, remedy, facts)

    chips = _chips(machine)
    if not chips:
        reason = f"{VARIABLE}=tpu, and there is no device node of a chip"
        remedy = "in a container: hand in /dev/vfio (from v5e) or /dev/accel*"
        return _absent(reason, remedy, facts)

    first = Fact(chips[0], "there")
    return _present("TPU, by JAX", f"{VARIABLE}=tpu: the first chip", [*facts, first])


def _chips(machine: Machine) -> list[str]:
    """Return the device nodes of TPU chips: ``/dev/accel0`` until v4, ``/dev/vfio/0`` from v5e."""
    accelerators = [
        f"/dev/{name}"
        for name in machine.names("/dev")
        # /dev/accel alone is a folder, with the devices of other vendors.
        if re.fullmatch(r"accel\d+", name)
    ]
    groups = [
        f"/dev/vfio/{name}"
        for name in machine.names("/dev/vfio")
        # /dev/vfio/vfio is there without a chip.
        if name.isdecimal()
    ]
    return accelerators + groups


SPEC = PlatformSpec(probe=probe, platform_class="opgraft_jax.platform:JaxPlatform")
