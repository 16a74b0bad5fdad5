"""Machines with NVIDIA GPUs.

Formats of the driver's files: kernel-open/nvidia/nv-procfs.c of NVIDIA/open-gpu-kernel-modules, nv_procfs_read_gpu_info
and nv_procfs_read_version; a real ``information`` stands in https://github.com/canonical/snapd/pull/14893, a real
``version`` in https://www.talos.dev (NVIDIA GPU guide). MIG: https://docs.nvidia.com/datacenter/tesla/mig-user-guide,
"Device Nodes and Capabilities"; the content of ``access`` stands in the snapd thread too. PCI ids: the table
"Compatible GPUs" of the same kernel modules' README.md.
"""

from __future__ import annotations

from collections.abc import Callable

from support.machines.build import Tree

DRIVER = "/proc/driver/nvidia"
H100 = (0x2330, "NVIDIA H100 80GB HBM3", 0x16C1)
A40 = (0x2235, "NVIDIA A40", 0x145A)


def add_driver(tree: Tree, version: str = "570.124.06") -> None:
    build = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build  (dvs-builder@U22)"
    tree.write(
        f"{DRIVER}/version",
        f"{build}  Wed Feb 26 01:53:13 UTC 2025\nGCC version:  gcc version 12.3.0\n",
    )
    tree.add_nodes("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")


def uuid(minor: int) -> str:
    return f"GPU-{minor:08x}-4d1c-4f6e-9a2b-3c5d7e9f0a1b"


def add_information(tree: Tree, address: str, minor: int, name: str) -> None:
    lines = (
        f"Model: \t\t {name}",
        "IRQ:   \t\t 16",
        f"GPU UUID: \t {uuid(minor)}",
        "Video BIOS: \t 96.00.89.00.01",
        "Bus Type: \t PCIe",
        "DMA Size: \t 52 bits",
        "DMA Mask: \t 0xfffffffffffff",
        f"Bus Location: \t {address}",
        f"Device Minor: \t {minor}",
        "GPU Firmware: \t 570.124.06",
        "GPU Excluded:\t No",
    )
    tree.write(f"{DRIVER}/gpus/{address}/information", "\n".join(lines) + "\n")


def add_gpus(
    tree: Tree,
    count: int,
    card: tuple[int, str, int] = H100,
    *,
    driver: str | None = "nvidia",
    nodes: tuple[int, ...] | None = None,
    denied: bool = False,
) -> list[str]:
    """GPUs spread over two sockets; ``nodes`` are the minors that have a device node, all of them where not given."""
    device, name, subsystem = card
    addresses = [f"0000:{0x18 + 0x10 * minor:02x}:00.0" for minor in range(count)]
    for minor, address in enumerate(addresses):
        node = minor * 2 // count
        tree.add_pci(
            address, 0x10DE, device, 0x030200, subsystem=subsystem, numa_node=node, driver=driver
        )
        if driver == "nvidia":
            add_information(tree, address, minor, name)
            if nodes is None or minor in nodes:
                tree.add_nodes(f"/dev/nvidia{minor}", denied=denied)
    return addresses


def add_mig(tree: Tree, gpu: int, instances: int, first_minor: int) -> None:
    """GPU instances of one compute instance each; their device nodes are numbered through."""
    folder = f"{DRIVER}/capabilities/gpu{gpu}/mig"
    for index in range(instances):
        for offset, path in enumerate((f"gi{index + 7}", f"gi{index + 7}/ci0")):
            minor = first_minor + 2 * index + offset
            text = f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n"
            tree.write(f"{folder}/{path}/access", text)
            tree.add_nodes(f"/dev/nvidia-caps/nvidia-cap{minor}")


def h100_mig(tree: Tree) -> None:
    """The largest machine: 8 GPUs, two of them cut in seven; 4 NVSwitches; 200 PCI functions in all."""
    tree.add_cpu(processors=224)
    tree.add_torch("2.8.0+cu128", cuda="12.8")
    add_driver(tree)
    add_gpus(tree, 8)
    add_mig(tree, 0, 7, 12)
    add_mig(tree, 5, 7, 687)
    for index in range(4):
        tree.add_pci(
            f"0000:{index + 5:02x}:00.0",
            0x10DE,
            0x22A3,
            0x068000,
            numa_node=index // 2,
            driver="nvidia-nvswitch",
        )
    tree.add_other_functions(188)


def h100_cpu_torch(tree: Tree) -> None:
    tree.add_cpu()
    tree.add_torch("2.8.0+cpu")
    add_driver(tree)
    add_gpus(tree, 8)


def h100(**options: object) -> Callable[[Tree], None]:
    """A healthy machine of four GPUs, but for ``options`` of ``add_gpus``; ``environ`` are its variables."""

    def build(tree: Tree) -> None:
        environ = options.get("environ", {})
        tree.add_cpu()
        tree.add_torch("2.8.0+cu128", cuda="12.8")
        add_driver(tree)
        add_gpus(tree, 4, **{name: value for name, value in options.items() if name != "environ"})
        tree.environ.update(environ)

    return build


def driver_missing(driver: str | None) -> Callable[[Tree], None]:
    """GPUs that PCI shows, and no driver of NVIDIA's."""

    def build(tree: Tree) -> None:
        tree.add_cpu()
        tree.add_torch("2.8.0+cu128", cuda="12.8")
        add_gpus(tree, 2, A40, driver=driver)

    return build


def container_without_nodes(tree: Tree) -> None:
    """Without NVIDIA's container toolkit /proc and /sys are the host's, and /dev has none of its nodes."""
    h100(nodes=())(tree)
    for node in ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"):
        (tree.root / "dev" / node).unlink()


def jetson(tree: Tree) -> None:
    """A Jetson AGX Orin. /etc/nv_tegra_release: NVIDIA's forum, and pull requests that read it; device tree: Linux,
    arch/arm64/boot/dts/nvidia/tegra234-p3737-0000+p3701-0000.dts. Its PCI root port is NVIDIA's as well."""
    release = "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64"
    tree.write("/etc/nv_tegra_release", f"{release}, DATE: Wed Jan  8 01:49:37 UTC 2025\n")
    tree.write("/proc/device-tree/model", "NVIDIA Jetson AGX Orin Developer Kit\0")
    tree.write(
        "/proc/device-tree/compatible",
        "nvidia,p3737-0000+p3701-0000\0nvidia,p3701-0000\0nvidia,tegra234\0",
    )
    tree.write(
        "/proc/cpuinfo",
        "processor\t: 0\nFeatures\t: fp asimd evtstrm aes\nCPU implementer\t: 0x41\n",
    )
    tree.write("/proc/meminfo", "MemTotal:       64349612 kB\n")
    tree.add_nodes("/dev/nvhost-gpu", "/dev/nvmap")
    tree.add_pci("0004:00:00.0", 0x10DE, 0x229C, 0x060400, driver="pcieport")
    tree.add_torch("2.8.0", cuda="12.6")


def wsl(tree: Tree) -> None:
    """The Windows host's GPU is a function of Microsoft's (1414:008e) here; its libraries are mounted.

    Device node and libraries: https://docs.nvidia.com/cuda/wsl-user-guide; driver: drivers/hv/dxgkrnl of
    microsoft/WSL2-Linux-Kernel.
    """
    tree.add_cpu("13th Gen Intel(R) Core(TM) i9-13900K", "fpu sse4_2 avx avx2", memory_kib=32775168)
    tree.add_pci("5582:00:00.0", 0x1414, 0x008E, 0x030200, driver="dxgkrnl")
    tree.add_nodes("/dev/dxg")
    for library in ("libcuda.so.1", "libdxcore.so", "libnvidia-ml.so.1"):
        tree.write(f"/usr/lib/wsl/lib/{library}")
    tree.add_torch("2.8.0+cu128", cuda="12.8")


def wsl_other_vendor(tree: Tree) -> None:
    """The same device node, and a GPU that is not NVIDIA's."""
    wsl(tree)
    for library in ("libcuda.so.1", "libnvidia-ml.so.1"):
        (tree.root / "usr/lib/wsl/lib" / library).unlink()
    tree.add_torch("2.8.0+cpu")


def sandbox(tree: Tree) -> None:
    """A sandbox that passes device nodes and shows neither /sys nor the driver's files (gVisor's nvproxy)."""
    tree.add_cpu()
    tree.add_torch("2.8.0+cu128", cuda="12.8")
    tree.add_nodes("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidia1")


def impostor(tree: Tree) -> None:
    """A device of another vendor (9999 is MetaX) whose software stands where NVIDIA's would.

    Its torch says that it has CUDA, and files of the driver name an A100: PCI says what it is.
    """
    tree.add_cpu()
    tree.add_torch("2.8.0+metax3.2", cuda="11.6")
    tree.add_pci("0000:3b:00.0", 0x9999, 0x4001, 0x030200, numa_node=0, driver="metax")
    add_driver(tree, "450.80.02")
    add_information(tree, "0000:3b:00.0", 0, "NVIDIA A100-SXM4-80GB")
    tree.add_nodes("/dev/nvidia0", "/dev/mxcd")


MACHINES = {
    "nvidia-8-h100-mig": h100_mig,
    "nvidia-cpu-torch": h100_cpu_torch,
    "nvidia-4-h100": h100(),
    "nvidia-all-hidden": h100(environ={"CUDA_VISIBLE_DEVICES": ""}),
    "nvidia-all-hidden-by-minus-one": h100(environ={"CUDA_VISIBLE_DEVICES": "-1"}),
    "nvidia-two-by-uuid": h100(environ={"CUDA_VISIBLE_DEVICES": f"{uuid(3)},{uuid(1)}"}),
    "nvidia-no-permission": h100(denied=True),
    "nvidia-container-partial": h100(nodes=(1, 2)),
    "nvidia-container-no-nodes": container_without_nodes,
    "nvidia-driver-missing": driver_missing(None),
    "nvidia-nouveau": driver_missing("nouveau"),
    "nvidia-jetson": jetson,
    "nvidia-wsl": wsl,
    "nvidia-sandbox": sandbox,
    "other-wsl": wsl_other_vendor,
    "other-impostor": impostor,
}
