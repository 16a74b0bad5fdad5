"""The CPU platform: available everywhere, chosen last."""

from opgraft.platform import PlatformSpec
from opgraft.platforms.cpu.probe import probe

SPEC = PlatformSpec(probe=probe, platform_class="opgraft.platforms.cpu.platform:CpuPlatform", priority=-100)
