"""Machines with hardware that no built-in platform serves.

Where a format beyond PCI is known, its source stands beside it; of the others, ids and class only are written. Vendor
ids: the detectors of gpustack/runtime, and pci.ids for Huawei, Habana, Hygon and Moore Threads.
"""

from __future__ import annotations

from collections.abc import Callable

from support.machines.build import Tree

ACCELERATOR, VGA, CONTROLLER_3D, OTHER_DISPLAY, CO_PROCESSOR = (
    0x120000,
    0x030000,
    0x030200,
    0x038000,
    0x0B4000,
)


def ascend(tree: Tree) -> None:
    """Atlas 800T A2.

    d802 as "Processing accelerators": Ascend's installation guides. The board management controller has a VGA function
    (pci.ids 1711) and the processor a compression engine of class 12 (a250: Kunpeng's guides), neither of which is an
    NPU. Nodes: docs.vllm.ai/projects/ascend, installation with docker.
    """
    tree.add_cpu("Kunpeng-920", "", memory_kib=1584234496)
    for index in range(8):
        address = f"0000:{0xC1 - 0x10 * index:02x}:00.0"
        tree.add_pci(
            address,
            0x19E5,
            0xD802,
            ACCELERATOR,
            numa_node=index // 4,
            driver="devdrv_device_driver",
        )
        tree.add_nodes(f"/dev/davinci{index}")
    tree.add_pci("0000:05:00.0", 0x19E5, 0x1711, VGA, driver="hibmc-drm")
    tree.add_pci("0000:75:00.0", 0x19E5, 0xA250, ACCELERATOR, driver="hisi_zip")
    tree.add_nodes("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")


def ascend_container(tree: Tree) -> None:
    """A container that sees the nodes of two NPUs and no PCI."""
    tree.add_cpu("Kunpeng-920", "")
    tree.add_nodes(
        "/dev/davinci3", "/dev/davinci7", "/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"
    )


def huawei_server(tree: Tree) -> None:
    """The same vendor's server without an NPU."""
    tree.add_cpu("Kunpeng-920", "")
    tree.add_pci("0000:05:00.0", 0x19E5, 0x1711, VGA, driver="hibmc-drm")
    tree.add_pci("0000:75:00.0", 0x19E5, 0xA250, ACCELERATOR, driver="hisi_zip")
    tree.add_pci("0000:7d:00.0", 0x19E5, 0xA222, 0x020000, driver="hns3")


def gaudi2(tree: Tree) -> None:
    """Eight cards at /dev/accel/accel<N>, with a control node each.

    Ids: HabanaAI's habanalabs driver; nodes: hlthunk.h (hlthunk_open_control_by_bus_id) and the habana operator's
    documentation. /sys/class/accel: Documentation/ABI/testing/sysfs-driver-habanalabs of Linux.
    """
    tree.add_cpu(
        "Intel(R) Xeon(R) Platinum 8380 CPU @ 2.30GHz", "fpu sse4_2 avx avx2 avx512f avx512_vnni"
    )
    for index in range(8):
        address = f"0000:{0x19 + 0x1A * (index % 4) + index // 4:02x}:00.0"
        tree.add_pci(
            address, 0x1DA3, 0x1020, ACCELERATOR, numa_node=index // 4, driver="habanalabs"
        )
        tree.write(f"/sys/class/accel/accel{index}/device/device_type", "GAUDI2\n")
        tree.write(f"/sys/class/accel/accel{index}/device/pci_addr", f"{address}\n")
        tree.add_nodes(f"/dev/accel/accel{index}", f"/dev/accel/accel_controlD{index}")


def gaudi3(tree: Tree) -> None:
    tree.add_cpu()
    tree.add_pci("0000:19:00.0", 0x1DA3, 0x1060, ACCELERATOR, driver="habanalabs")


def intel_npu(tree: Tree) -> None:
    """A Meteor Lake laptop: an NPU at /dev/accel/accel0 and a GPU, both part of the processor.

    Id: drivers/accel/ivpu/ivpu_drv.h of Linux (PCI_DEVICE_ID_MTL).
    """
    tree.add_cpu("Intel(R) Core(TM) Ultra 7 155H", "fpu sse4_2 avx avx2", memory_kib=32433120)
    tree.add_pci("0000:00:02.0", 0x8086, 0x7D55, VGA, driver="i915")
    tree.add_pci("0000:00:0b.0", 0x8086, 0x7D1D, ACCELERATOR, driver="intel_vpu")
    tree.add_nodes("/dev/accel/accel0")


def hygon(tree: Tree) -> None:
    """K100_AI: "Co-processor" 6210 in PaddlePaddle's guide. The processor is the same vendor's."""
    hygon_processor(tree)
    for bus in (0x37, 0x3A):
        tree.add_pci(f"0000:{bus:02x}:00.0", 0x1D94, 0x6210, CO_PROCESSOR)


def hygon_processor(tree: Tree) -> None:
    tree.add_cpu("Hygon C86 7285 32-core Processor", "fpu sse4_2 avx avx2")
    tree.add_pci("0000:00:00.0", 0x1D94, 0x1450, 0x060000)
    tree.add_pci("0000:03:00.2", 0x1D94, 0x1456, 0x108000)


def metax(tree: Tree) -> None:
    """C500: "Display controller: Device 9999:4001" in a public bug report."""
    tree.add_cpu()
    for bus in (0x0E, 0x0F):
        tree.add_pci(f"0000:{bus:02x}:00.0", 0x9999, 0x4001, OTHER_DISPLAY)


def moore_threads(tree: Tree) -> None:
    """MTT S3000 (pci.ids 0222), with its audio function (02ff)."""
    tree.add_cpu()
    tree.add_pci("0000:0e:00.0", 0x1ED5, 0x0222, CONTROLLER_3D)
    tree.add_pci("0000:0e:00.1", 0x1ED5, 0x02FF, 0x040300)


def cambricon(tree: Tree) -> None:
    """MLU270: "Processing accelerators", device 0270, in Cambricon's own scripts."""
    tree.add_cpu()
    tree.add_pci("0000:3b:00.0", 0xCABC, 0x0270, ACCELERATOR)


def iluvatar(tree: Tree) -> None:
    """The vendor id is known here, its device ids and class are not."""
    tree.add_cpu()
    tree.add_pci("0000:3b:00.0", 0x1E3E, 0x0001, ACCELERATOR)


def apple(tree: Tree) -> None:
    """macOS: no /proc, no /sys, and the file that has told its version since 10.0 (sw_vers reads it)."""
    tree.write(
        "/System/Library/CoreServices/SystemVersion.plist",
        '<?xml version="1.0" encoding="UTF-8"?>\n',
    )
    tree.add_torch("2.8.0")


MACHINES: dict[str, Callable[[Tree], None]] = {
    "other-ascend-910b": ascend,
    "other-ascend-container": ascend_container,
    "other-huawei-server": huawei_server,
    "other-gaudi2": gaudi2,
    "other-gaudi3": gaudi3,
    "other-intel-npu": intel_npu,
    "other-hygon-k100-ai": hygon,
    "other-hygon-processor-only": hygon_processor,
    "other-metax": metax,
    "other-moore-threads": moore_threads,
    "other-cambricon": cambricon,
    "other-iluvatar": iluvatar,
    "other-apple": apple,
}
