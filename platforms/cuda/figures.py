"""Figures of NVIDIA's devices for data centres, from data sheets: dense, without sparsity."""

from opgraft.machine.device_figures import DeviceFigures

_HOPPER = {"bfloat16": 989.4e12, "float16": 989.4e12, "float32": 66.9e12}

DEVICES = (
    DeviceFigures(
        "a100",
        memory=80 * 2**30,
        bandwidth=2.039e12,
        flops={"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12},
        link=300e9,
        network=25e9,
        source="A100 SXM data sheet (NVLink 600 GB/s both ways together); "
        "DGX A100 for the network, 200 Gb/s each",
    ),
    DeviceFigures(
        "h100",
        memory=80 * 2**30,
        bandwidth=3.35e12,
        flops=_HOPPER,
        link=450e9,
        network=50e9,
        source="H100 SXM data sheet (NVLink 900 GB/s both ways together); "
        "DGX H100 for the network, 400 Gb/s each",
    ),
    DeviceFigures(
        "h200",
        memory=140 * 2**30,
        bandwidth=4.8e12,
        flops=_HOPPER,
        link=450e9,
        network=50e9,
        source="H200 SXM data sheet, of 141 GB of which programs see 140 GiB; "
        "DGX H200 for the network, 400 Gb/s each",
    ),
)
