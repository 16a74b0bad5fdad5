"""Chips by PCI device id or device-tree name.

NVIDIA numbers the devices of a chip in one block. Sources of the blocks: the PCI ID database
(https://pci-ids.ucw.cz, vendor 10de) and the table of NVIDIA/open-gpu-kernel-modules (README.md,
"Compatible GPUs"). Source of the compute capabilities: https://developer.nvidia.com/cuda-gpus.
"""

from __future__ import annotations

BLOCKS = (
    (0x13C0, 0x142F, "Maxwell", "sm_52"),
    (0x15F0, 0x15FF, "Pascal", "sm_60"),
    (0x17C0, 0x17FF, "Maxwell", "sm_52"),
    (0x1B00, 0x1D7F, "Pascal", "sm_61"),
    (0x1D80, 0x1DFF, "Volta", "sm_70"),
    (0x1E00, 0x1FFF, "Turing", "sm_75"),
    (0x2080, 0x20FF, "Ampere", "sm_80"),
    (0x2180, 0x21FF, "Turing", "sm_75"),
    (0x2200, 0x22FF, "Ampere", "sm_86"),
    (0x2300, 0x23FF, "Hopper", "sm_90"),
    (0x2400, 0x25FF, "Ampere", "sm_86"),
    (0x2600, 0x28FF, "Ada", "sm_89"),
    (0x2900, 0x29FF, "Blackwell", "sm_100"),
    (0x2B00, 0x2B0F, "Blackwell", "sm_110"),
    (0x2B80, 0x2DFF, "Blackwell", "sm_120"),
    (0x2E00, 0x2E7F, "Blackwell", "sm_121"),
    (0x2F00, 0x2FFF, "Blackwell", "sm_120"),
    (0x3180, 0x31FF, "Blackwell", "sm_103"),
)
"""First and last device id, architecture, compute capability."""

TEGRA = {
    "tegra210": "sm_53",
    "tegra186": "sm_62",
    "tegra194": "sm_72",
    "tegra234": "sm_87",
    "tegra264": "sm_110",
}
"""System on a chip with a GPU without a PCI address (Jetson) → compute capability."""


def chip(device: int) -> tuple[str, str | None]:
    """Return name and compute capability for a PCI device id."""
    identity = f"(10de:{device:04x})"
    for first, last, architecture, capability in BLOCKS:
        if first <= device <= last:
            return f"NVIDIA {architecture} GPU {identity}", capability
    # A newer chip than the table knows: the library or torch may tell more.
    return f"NVIDIA GPU {identity}", None
