"""Finding the device. Imports neither torch nor jax: ``opgraft detect`` asks this on machines of all kinds."""

from __future__ import annotations

import re

from opgraft import Device, Evidence, Fact, Machine, PlatformSpec

VARIABLE = "JAX_RUNTIME_DEVICE"
"""``cpu`` or ``tpu``. An out-of-tree platform comes before the built-in ones, so this one is there on request only."""

_RUNTIME = ("jax", "jaxlib")


def probe(machine: Machine) -> Evidence:
    """Tell whether JAX was asked for and is there: a pure function of the machine, which never raises."""
    versions = {package: machine.version_of(package) for package in _RUNTIME}
    facts = tuple(
        Fact(f"package {name}", version or "not installed") for name, version in versions.items()
    )
    for name, version in versions.items():
        if version is None:
            return Evidence(
                False, f"{name} is not installed", (), facts, "pip install jax, for TPUs 'jax[tpu]'"
            )
        if not version.startswith("0.10."):
            reason = f"{name} {version} is installed, and this plugin is for 0.10"
            return Evidence(False, reason, (), facts, "pip install 'jax>=0.10,<0.11'")
    wanted = machine.environ.get(VARIABLE, "")
    facts = (*facts, Fact(VARIABLE, wanted or "not set"))
    if wanted == "cpu":
        return Evidence(True, f"{VARIABLE}=cpu: XLA for the CPU", (Device("CPU, by XLA"),), facts)
    if wanted == "tpu":
        return _tpu(machine, facts)
    if wanted:
        reason = f"{VARIABLE}={wanted!r} is no device that this plugin knows"
        return Evidence(False, reason, (), facts, f"set {VARIABLE} to cpu or tpu")
    return Evidence(
        False, f"not asked for: {VARIABLE} is not set", (), facts, f"set {VARIABLE} to cpu or tpu"
    )


def _tpu(machine: Machine, facts: tuple[Fact, ...]) -> Evidence:
    if machine.version_of("libtpu") is None:
        return Evidence(
            False,
            f"{VARIABLE}=tpu, and libtpu is not installed",
            (),
            facts,
            "pip install 'jax[tpu]'",
        )
    nodes = [f"/dev/{name}" for name in machine.names("/dev") if re.fullmatch(r"accel\d+", name)]
    nodes += [f"/dev/vfio/{name}" for name in machine.names("/dev/vfio") if name.isdecimal()]
    if not nodes:
        reason = f"{VARIABLE}=tpu, and there is no device node of a chip"
        return Evidence(
            False, reason, (), facts, "in a container: hand in /dev/vfio (from v5e) or /dev/accel*"
        )
    return Evidence(
        True,
        f"{VARIABLE}=tpu: the first chip",
        (Device("TPU, by JAX"),),
        (*facts, Fact(nodes[0], "there")),
    )


SPEC = PlatformSpec(probe=probe, platform_class="opgraft_jax.platform:JaxPlatform")
