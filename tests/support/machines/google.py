"""Machines with TPUs, and Google's machines without.

Device ids, subsystems and nodes: tpu_info/device.py of AI-Hypercomputer/cloud-accelerator-diagnostics; the node below
/dev/vfio bears the number of the iommu group: _internal/utils/hardware.py of torch_tpu 0.2.0. PCI class ff00 and
addresses from 00:04.0 on: lspci of a v2-8 in a public notebook ("Unassigned class [ff00]: Google, Inc. Device 0027").
Other functions of the vendor: pci.ids (001f NVMe, 0042 gVNIC). The name of the driver up to v4 is not known here.
"""

from __future__ import annotations

from collections.abc import Callable

from support.machines.build import Tree

V2_OR_V3, V4, V5P, V5E, V6E, V7X = 0x0027, 0x005E, 0x0062, 0x0063, 0x006F, 0x0076
UNASSIGNED = 0xFF0000


def add_vm(tree: Tree) -> None:
    """A VM of Compute Engine: a gVNIC and an NVMe drive, both functions of Google's."""
    tree.add_cpu("AMD EPYC 9B14", "fpu sse4_2 avx avx2 avx512f avx512_bf16", memory_kib=1485281568)
    tree.add_pci("0000:00:03.0", 0x1AE0, 0x0042, 0x020000, driver="gve", numa_node=0)
    tree.add_pci("0000:00:1f.0", 0x1AE0, 0x001F, 0x010802, driver="nvme", numa_node=0)


def add_accel_chips(tree: Tree, device: int, count: int, subsystem: int = 0) -> None:
    """Chips up to v4, at /dev/accel<index>."""
    for index in range(count):
        tree.add_pci(
            f"0000:00:{4 + index:02x}.0",
            0x1AE0,
            device,
            UNASSIGNED,
            subsystem=subsystem,
            numa_node=0,
        )
        tree.add_nodes(f"/dev/accel{index}")


def add_vfio_chips(
    tree: Tree, device: int, count: int, *, nodes: bool = True, denied: bool = False
) -> None:
    """Chips from v5e on, at /dev/vfio/<iommu group>; the groups do not count from 0."""
    for index in range(count):
        address, group = f"0000:00:{4 + index:02x}.0", index + 10
        node = index * 2 // count
        tree.add_pci(
            address,
            0x1AE0,
            device,
            UNASSIGNED,
            numa_node=node,
            driver="vfio-pci",
            iommu_group=group,
        )
        if nodes:
            tree.add_nodes(f"/dev/vfio/{group}", denied=denied)
    if nodes:
        tree.add_nodes("/dev/vfio/vfio")


def add_torch_xla(tree: Tree) -> None:
    tree.add_torch("2.9.1")
    tree.packages.update(torch_xla="2.9.0", libtpu="0.0.21")


def add_torch_tpu(tree: Tree) -> None:
    tree.add_torch("2.13.0+cpu")
    tree.packages.update(torch_tpu="0.2.0", libtpu="0.0.50")


def v2(tree: Tree) -> None:
    add_vm(tree)
    add_accel_chips(tree, V2_OR_V3, 4, subsystem=0x004E)
    add_torch_xla(tree)


def v3(tree: Tree) -> None:
    add_vm(tree)
    add_accel_chips(tree, V2_OR_V3, 4, subsystem=0x004F)
    add_torch_xla(tree)


def v4(tree: Tree) -> None:
    add_vm(tree)
    add_accel_chips(tree, V4, 4)
    add_torch_xla(tree)


def v4_with_torch_tpu(tree: Tree) -> None:
    add_vm(tree)
    add_accel_chips(tree, V4, 4)
    add_torch_tpu(tree)


def v5e_second_hidden(tree: Tree) -> None:
    add_vm(tree)
    add_vfio_chips(tree, V5E, 4)
    add_torch_tpu(tree)
    tree.environ["TPU_VISIBLE_CHIPS"] = "0,2,3"


def v5e_all_hidden(tree: Tree) -> None:
    v5e_second_hidden(tree)
    tree.environ["TPU_VISIBLE_CHIPS"] = "8"


def v5p(tree: Tree) -> None:
    add_vm(tree)
    add_vfio_chips(tree, V5P, 4)
    add_torch_xla(tree)


def v6e(tree: Tree) -> None:
    add_vm(tree)
    add_vfio_chips(tree, V6E, 8)
    add_torch_tpu(tree)
    tree.environ.update(TPU_ACCELERATOR_TYPE="v6e-8", TPU_WORKER_ID="0")


def v6e_no_package(tree: Tree) -> None:
    """torch is between the versions that the two packages are built for."""
    v6e(tree)
    tree.add_torch("2.10.0+cpu")


def v6e_mismatch(tree: Tree) -> None:
    """torch_xla declares no requirement on torch, so pip installs it beside any."""
    add_vm(tree)
    add_vfio_chips(tree, V6E, 8)
    add_torch_xla(tree)
    tree.add_torch("2.13.0+cpu")


def v6e_no_libtpu(tree: Tree) -> None:
    v6e(tree)
    del tree.packages["libtpu"]


def v6e_other_client(tree: Tree) -> None:
    add_vm(tree)
    add_vfio_chips(tree, V6E, 1)
    add_torch_xla(tree)
    tree.environ["PJRT_DEVICE"] = "NEURON"


def v6e_container(tree: Tree) -> None:
    """A container that was not handed the nodes."""
    add_vm(tree)
    add_vfio_chips(tree, V6E, 4, nodes=False)
    add_torch_tpu(tree)


def v6e_no_permission(tree: Tree) -> None:
    add_vm(tree)
    add_vfio_chips(tree, V6E, 4, denied=True)
    add_torch_tpu(tree)


def v6e_no_driver(tree: Tree) -> None:
    add_vm(tree)
    tree.add_pci("0000:00:04.0", 0x1AE0, V6E, UNASSIGNED)
    add_torch_tpu(tree)


def v7x(tree: Tree) -> None:
    add_vm(tree)
    add_vfio_chips(tree, V7X, 4)
    add_torch_tpu(tree)


def no_tpu(tree: Tree) -> None:
    """The functions of Google's that every VM has make no TPU, torch_xla or not."""
    add_vm(tree)
    add_torch_xla(tree)


def xla_on_cpu(tree: Tree) -> None:
    no_tpu(tree)
    tree.environ["PJRT_DEVICE"] = "CPU"


def cpu_client_without_xla(tree: Tree) -> None:
    add_vm(tree)
    tree.environ["PJRT_DEVICE"] = "CPU"


MACHINES: dict[str, Callable[[Tree], None]] = {
    "google-tpu-v2": v2,
    "google-tpu-v3": v3,
    "google-tpu-v4": v4,
    "google-tpu-v4-torch-tpu": v4_with_torch_tpu,
    "google-tpu-v5e-second-hidden": v5e_second_hidden,
    "google-tpu-v5e-all-hidden": v5e_all_hidden,
    "google-tpu-v5p": v5p,
    "google-tpu-v6e": v6e,
    "google-tpu-v6e-no-package": v6e_no_package,
    "google-tpu-v6e-xla-for-other-torch": v6e_mismatch,
    "google-tpu-v6e-no-libtpu": v6e_no_libtpu,
    "google-tpu-v6e-other-client": v6e_other_client,
    "google-tpu-v6e-no-node": v6e_container,
    "google-tpu-v6e-no-permission": v6e_no_permission,
    "google-tpu-v6e-no-driver": v6e_no_driver,
    "google-tpu-v7x": v7x,
    "google-no-tpu": no_tpu,
    "google-xla-on-cpu": xla_on_cpu,
    "google-cpu-client-without-xla": cpu_client_without_xla,
}
