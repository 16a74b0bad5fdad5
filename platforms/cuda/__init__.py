"""NVIDIA GPUs, through CUDA."""

from opgraft.platform import PlatformSpec
from opgraft.platforms.cuda.probe import probe

SPEC = PlatformSpec(
    probe=probe,
    platform_class="opgraft.platforms.cuda.platform:CudaPlatform",
    priority=40,
    devices="opgraft.platforms.cuda.figures:DEVICES",
)
