"""The CPU platform: available everywhere, chosen last."""

from opgraft.platform import PlatformSpec
from opgraft.platforms.cpu.probe import probe
from opgraft.platforms.hardware import sightings

SPEC = PlatformSpec(
    probe, "opgraft.platforms.cpu.platform:CpuPlatform", priority=-100, sightings=sightings
)
