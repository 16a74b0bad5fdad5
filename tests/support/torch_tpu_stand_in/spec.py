"""The platform for TPUs, whose probe finds the chips of the simulated slice."""

from opgraft import Evidence, PlatformSpec


def probe(machine: object) -> Evidence:
    return Evidence(True, "a simulated slice")


SPEC = PlatformSpec(probe, "torch_tpu:SlicePlatform", priority=2000)
