"""Figures of Google's TPUs, from Cloud TPU's documentation by version.

All chips of a slice are linked. ``link`` is the sum over all links of a chip in one direction.
"""

from opgraft.machine.device_figures import DeviceFigures

_SOURCE = "Cloud TPU documentation, system architecture of "

DEVICES = (
    DeviceFigures(
        "tpu-v4",
        memory=32 * 2**30,
        bandwidth=1.228e12,
        flops={"bfloat16": 275e12},
        link=300e9,
        linked=4096,
        source=f"{_SOURCE}v4",
    ),
    DeviceFigures(
        "tpu-v5e",
        memory=16 * 2**30,
        bandwidth=0.819e12,
        flops={"bfloat16": 197e12},
        link=200e9,
        linked=256,
        source=f"{_SOURCE}v5e",
    ),
    DeviceFigures(
        "tpu-v5p",
        memory=95 * 2**30,
        bandwidth=2.765e12,
        flops={"bfloat16": 459e12},
        link=600e9,
        linked=8960,
        source=f"{_SOURCE}v5p",
    ),
    DeviceFigures(
        "tpu-v6e",
        memory=32 * 2**30,
        bandwidth=1.638e12,
        flops={"bfloat16": 918e12},
        link=400e9,
        linked=256,
        source=f"{_SOURCE}v6e",
    ),
)
