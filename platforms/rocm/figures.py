"""Figures of AMD's devices for data centres, from data sheets: dense, without sparsity."""

from opgraft.machine.device_figures import DeviceFigures

DEVICES = (
    DeviceFigures(
        "mi300x",
        memory=192e9,
        bandwidth=5.3e12,
        flops={"bfloat16": 1307.4e12, "float16": 1307.4e12, "float32": 163.4e12},
        link=448e9,
        network=50e9,
        source="Instinct MI300X data sheet (7 Infinity Fabric links of 128 GB/s both ways); "
        "400 Gb/s of network",
    ),
)
