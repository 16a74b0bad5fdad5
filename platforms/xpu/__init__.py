"""The XPU platform: Intel's discrete GPUs through PyTorch's own ``torch.xpu``."""

from opgraft.platform import PlatformSpec
from opgraft.platforms.xpu.probe import probe

SPEC = PlatformSpec(
    probe=probe, platform_class="opgraft.platforms.xpu.platform:XpuPlatform", priority=20
)
