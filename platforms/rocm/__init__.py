"""AMD GPUs, through ROCm."""

from opgraft.platform import PlatformSpec
from opgraft.platforms.rocm.probe import probe

SPEC = PlatformSpec(
    probe=probe,
    platform_class="opgraft.platforms.rocm.platform:RocmPlatform",
    priority=30,
    devices="opgraft.platforms.rocm.figures:DEVICES",
)
