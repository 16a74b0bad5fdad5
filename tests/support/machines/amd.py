"""Machines with AMD GPUs.

Formats of the topology: drivers/gpu/drm/amd/amdkfd/kfd_topology.c of Linux (node_show, mem_show); real trees are the
test data of https://github.com/ROCm/k8s-device-plugin. ``product_name``: Documentation/gpu/amdgpu/driver-misc.rst of
Linux. PCI ids: https://pci-ids.ucw.cz, vendor 1002.
"""

from __future__ import annotations

from collections.abc import Callable

from support.machines.build import Tree

NODES = "/sys/class/kfd/kfd/topology/nodes"
MI300X = 0x74A1
GIB = 1 << 30


def add_cpu_node(tree: Tree, number: int) -> None:
    properties = {
        "cpu_cores_count": 96,
        "simd_count": 0,
        "mem_banks_count": 1,
        "gfx_target_version": 0,
        "vendor_id": 0,
    }
    _add_node(tree, number, 0, "", properties, heap_type=0, memory=1133 * GIB)


def add_gpu_node(
    tree: Tree,
    number: int,
    render_minor: int,
    *,
    device: int = MI300X,
    target: int = 90402,
    location: int,
    xccs: int = 8,
    memory: int = 192 * GIB,
    vendor: int = 0x1002,
    card: int = 0,
) -> None:
    properties = {
        "cpu_cores_count": 0,
        "simd_count": 152 * xccs,
        "mem_banks_count": 1,
        "wave_front_size": 64,
        "simd_per_cu": 4,
        "gfx_target_version": target,
        "vendor_id": vendor,
        "device_id": device,
        "location_id": location,
        "domain": 0,
        "drm_render_minor": render_minor,
        "local_mem_size": 0,
        "unique_id": 0x4D1C4F6E9A2B0000 + card,
        "num_xcc": xccs,
    }
    _add_node(tree, number, 20000 + number, "ip discovery", properties, heap_type=1, memory=memory)


def _add_node(
    tree: Tree,
    number: int,
    gpu_id: int,
    name: str,
    properties: dict[str, int],
    *,
    heap_type: int,
    memory: int,
) -> None:
    folder = f"{NODES}/{number}"
    tree.write(f"{folder}/gpu_id", f"{gpu_id}\n")
    tree.write(f"{folder}/name", f"{name}\n")
    tree.write(f"{folder}/properties", _lines(properties))
    bank = {
        "heap_type": heap_type,
        "size_in_bytes": memory,
        "flags": 0,
        "width": 8192,
        "mem_clk_max": 1300,
    }
    tree.write(f"{folder}/mem_banks/0/properties", _lines(bank))


def _lines(values: dict[str, int]) -> str:
    return "".join(f"{key} {value}\n" for key, value in values.items())


def add_card(tree: Tree, card: int, partitions: int, *, driver: str | None = "amdgpu") -> None:
    """An MI300X in so many partitions: one (SPX) or eight (CPX); with the driver, its nodes and device nodes."""
    bus = 0x05 + 0x20 * card
    folder = tree.add_pci(
        f"0000:{bus:02x}:00.0", 0x1002, MI300X, 0x120000, numa_node=card // 4, driver=driver
    )
    if driver != "amdgpu":
        return
    tree.write(f"{folder}/product_name", "AMD Instinct MI300X OAM\n")
    for partition in range(partitions):
        minor = 128 + 8 * card + partition
        shape = {"xccs": 8 // partitions, "memory": 192 * GIB // partitions}
        number = 2 + card * partitions + partition
        add_gpu_node(tree, number, minor, location=bus << 8 | partition, card=card, **shape)
        tree.add_nodes(f"/dev/dri/renderD{minor}")


def mi300x(
    cards: int, partitions: int = 1, *, environ: dict[str, str] | None = None, denied: bool = False
) -> Callable[[Tree], None]:
    def build(tree: Tree) -> None:
        tree.add_cpu(
            "AMD EPYC 9654 96-Core Processor", "fpu sse4_2 avx avx2 avx512f avx512_bf16 avx512_vnni"
        )
        tree.add_torch("2.8.0+rocm6.4", hip="6.4.43482-0f2d60242")
        tree.write("/sys/module/amdgpu/version", "6.12.12\n")
        tree.add_nodes("/dev/kfd", denied=denied)
        for number in range(2):
            add_cpu_node(tree, number)
        for card in range(cards):
            add_card(tree, card, partitions)
        tree.environ.update(environ or {})

    return build


def container_partial(tree: Tree) -> None:
    """A container that was given two of eight GPUs: the kernel refuses it the files of the others."""
    mi300x(8)(tree)
    for card in range(8):
        if card not in (2, 3):
            (tree.root / f"dev/dri/renderD{128 + 8 * card}").unlink()
            for name in ("gpu_id", "name", "properties", "mem_banks/0/properties"):
                (tree.root / NODES.lstrip("/") / str(2 + card) / name).unlink()


def driver_missing(tree: Tree) -> None:
    tree.add_cpu("AMD EPYC 9654 96-Core Processor", "fpu sse4_2 avx avx2 avx512f")
    tree.add_torch("2.8.0+rocm6.4", hip="6.4.43482-0f2d60242")
    add_card(tree, 0, 1, driver=None)


def radeon(tree: Tree) -> None:
    """A desktop: Radeon RX 7900 XTX (gfx1100), no memory that tells its name, torch for the CPU."""
    tree.add_cpu(
        "AMD Ryzen 9 7950X3D 16-Core Processor", "fpu sse4_2 avx avx2 avx512f", memory_kib=65536000
    )
    tree.add_pci("0000:03:00.0", 0x1002, 0x744C, 0x030000, driver="amdgpu")
    add_cpu_node(tree, 0)
    add_gpu_node(
        tree, 1, 128, device=0x744C, target=110000, location=0x0300, xccs=1, memory=24 * GIB
    )
    tree.add_nodes("/dev/kfd", "/dev/dri/renderD128")


def impostor(tree: Tree) -> None:
    """A Hygon DCU: AMD's topology and device nodes, under another vendor's id."""
    tree.add_cpu("Hygon C86 7490 64-core Processor", "fpu sse4_2 avx avx2")
    tree.add_torch("2.8.0+das.opt1", hip="6.1.25082")
    tree.add_pci("0000:05:00.0", 0x1D94, 0x6210, 0x120000, numa_node=0, driver="hydcu")
    add_cpu_node(tree, 0)
    add_gpu_node(
        tree, 1, 128, device=0x6210, target=90302, location=0x0500, memory=64 * GIB, vendor=0x1D94
    )
    tree.add_nodes("/dev/kfd", "/dev/dri/renderD128")


MACHINES = {
    "amd-8-mi300x-spx": mi300x(8),
    "amd-2-mi300x-cpx": mi300x(2, 8),
    "amd-no-permission": mi300x(8, denied=True),
    "amd-two-visible": mi300x(
        8, environ={"ROCR_VISIBLE_DEVICES": "4,5,6", "HIP_VISIBLE_DEVICES": "0,2"}
    ),
    "amd-all-hidden": mi300x(8, environ={"CUDA_VISIBLE_DEVICES": "-1"}),
    "amd-container-partial": container_partial,
    "amd-driver-missing": driver_missing,
    "amd-radeon-cpu-torch": radeon,
    "other-hygon-dcu": impostor,
}
