"""The TPU platform: Google's chips through torch_xla or torch_tpu, by the installed torch."""

from opgraft.platform import PlatformSpec
from opgraft.platforms.tpu.probe import probe

SPEC = PlatformSpec(
    probe=probe,
    platform_class="opgraft.platforms.tpu.platform:TpuPlatform",
    priority=10,
    devices="opgraft.platforms.tpu.figures:DEVICES",
)
