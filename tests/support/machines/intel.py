"""Machines with Intel GPUs.

PCI ids: include/drm/intel/pciids.h of Linux, named in shared/source/dll/devices of intel/compute-runtime. Local memory:
the driver xe has tile<N>/physical_vram_size_bytes (tests/intel/xe_sysfs_tile.c of igt-gpu-tools), Intel's own builds of
i915 have lmem_total_bytes (cmd/internal/labeler of intel/intel-device-plugins-for-kubernetes); Linux' i915 has neither.
drm folders and nodes: the same plugins' cmd/gpu_plugin, and Documentation/gpu/drm-uapi.rst of Linux.
"""

from __future__ import annotations

from collections.abc import Callable

from support.machines.build import Tree

MAX_1550, FLEX_170, ARC_A770, ARC_B580, ALDER_LAKE = 0x0BD5, 0x56C0, 0x56A0, 0xE20B, 0x46A6
OTHER_DISPLAY, VGA = 0x038000, 0x030000
XPU_BUILD = "20250100"  # torch.version.xpu, written by tools/generate_torch_version.py of PyTorch


def add_gpu(
    tree: Tree,
    address: str,
    device: int,
    number: int,
    *,
    code: int = VGA,
    driver: str | None = "xe",
    tiles: tuple[int, ...] = (),
    denied: bool = False,
    node: bool = True,
    numa_node: int = 0,
) -> str:
    """A GPU; ``number`` counts cards from 0, and ``tiles`` are the bytes of each, where the driver tells."""
    folder = tree.add_pci(address, 0x8086, device, code, numa_node=numa_node, driver=driver)
    if driver in ("xe", "i915"):
        tree.folder(f"{folder}/drm/card{number}")
        tree.folder(f"{folder}/drm/renderD{128 + number}")
        tree.add_nodes(f"/dev/dri/card{number}")
        if node:
            tree.add_nodes(f"/dev/dri/renderD{128 + number}", denied=denied)
    for tile, size in enumerate(tiles):
        tree.write(f"{folder}/tile{tile}/physical_vram_size_bytes", f"{size}\n")
    return folder


def add_two_max(tree: Tree) -> None:
    tree.add_cpu()
    tree.add_torch("2.8.0+xpu", xpu=XPU_BUILD)
    for number, address in enumerate(("0000:29:00.0", "0000:9a:00.0")):
        add_gpu(
            tree, address, MAX_1550, number, code=OTHER_DISPLAY, driver="i915", numa_node=number
        )
    tree.add_other_functions(24)


def composite_second(tree: Tree) -> None:
    """Cards instead of tiles as devices, and one of them chosen."""
    add_two_max(tree)
    tree.environ.update(ZE_FLAT_DEVICE_HIERARCHY="COMPOSITE", ZE_AFFINITY_MASK="1")


def one_tile(tree: Tree) -> None:
    add_two_max(tree)
    tree.environ["ZE_AFFINITY_MASK"] = "3"


def all_hidden(tree: Tree) -> None:
    add_two_max(tree)
    tree.environ["ZE_AFFINITY_MASK"] = "4"


def arc_beside_integrated(tree: Tree) -> None:
    """A desktop: the display is on the processor's GPU, a B580 is beside it."""
    tree.add_cpu("12th Gen Intel(R) Core(TM) i7-12700", "fpu sse4_2 avx avx2", memory_kib=32678540)
    tree.add_torch("2.8.0+xpu", xpu=XPU_BUILD)
    add_gpu(tree, "0000:00:02.0", ALDER_LAKE, 0, driver="i915")
    add_gpu(tree, "0000:03:00.0", ARC_B580, 1, tiles=(12 * 2**30,))


def arc_with_lmem(tree: Tree) -> None:
    """An A770 of 16 GiB, which its id does not tell, under Intel's build of i915, which does."""
    tree.add_cpu()
    tree.add_torch("2.8.0+xpu", xpu=XPU_BUILD)
    folder = add_gpu(tree, "0000:03:00.0", ARC_A770, 0, driver="i915")
    tree.write(f"{folder}/drm/card0/lmem_total_bytes", f"{16 * 2**30}\n")


def unknown_discrete(tree: Tree) -> None:
    """A card newer than the table of ids, with memory of its own."""
    tree.add_cpu()
    tree.add_torch("2.15.0+xpu", xpu="20260100")
    add_gpu(tree, "0000:03:00.0", 0xEFFF, 0, tiles=(24 * 2**30,))


def integrated(tree: Tree) -> None:
    tree.add_cpu("12th Gen Intel(R) Core(TM) i7-1260P", "fpu sse4_2 avx avx2", memory_kib=16285604)
    tree.add_torch("2.8.0+xpu", xpu=XPU_BUILD)
    add_gpu(tree, "0000:00:02.0", ALDER_LAKE, 0, driver="i915")


def torch_without_xpu(tree: Tree) -> None:
    add_two_max(tree)
    tree.add_torch("2.8.0+cpu")


def no_driver(tree: Tree) -> None:
    tree.add_cpu()
    tree.add_torch("2.8.0+xpu", xpu=XPU_BUILD)
    add_gpu(tree, "0000:4b:00.0", FLEX_170, 0, code=OTHER_DISPLAY, driver=None)


def no_permission(tree: Tree) -> None:
    arc_beside_integrated(tree)
    tree.denied.add("/dev/dri/renderD129")


def container_without_nodes(tree: Tree) -> None:
    tree.add_cpu()
    tree.add_torch("2.8.0+xpu", xpu=XPU_BUILD)
    add_gpu(tree, "0000:4b:00.0", FLEX_170, 0, code=OTHER_DISPLAY, driver="i915", node=False)


MACHINES: dict[str, Callable[[Tree], None]] = {
    "intel-2-max-1550": add_two_max,
    "intel-max-composite-second": composite_second,
    "intel-max-one-tile": one_tile,
    "intel-max-all-hidden": all_hidden,
    "intel-max-torch-without-xpu": torch_without_xpu,
    "intel-arc-beside-integrated": arc_beside_integrated,
    "intel-arc-lmem": arc_with_lmem,
    "intel-arc-no-permission": no_permission,
    "intel-unknown-discrete": unknown_discrete,
    "intel-flex-no-driver": no_driver,
    "intel-flex-no-node": container_without_nodes,
    "intel-integrated-only": integrated,
}
