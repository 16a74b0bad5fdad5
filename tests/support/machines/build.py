"""Fixture machines: trees of the files that probes read, written in the formats of the kernel and of drivers.

Each module of this folder has a table ``MACHINES`` from the name of a machine to the function that builds it, and cites
a public source beside each format. ``python tests/support/machines/build.py NAME DIR`` builds one to look at, for
``opgraft detect --root DIR``; without arguments it lists the names.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parent
NUMA_NODES = 2


@dataclass
class Tree:
    """A machine in the making; ``save`` writes what is not in its files. Device nodes are empty files.

    Attributes:
        root: the folder to write below.
        environ: environment variables.
        packages: installed distributions and their versions.
        backends: what torch's ``version.py`` gives a version for; empty for a CPU-only build.
        denied: device nodes that exist and may not be opened.
    """

    root: Path
    environ: dict[str, str] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)
    torch: str | None = "2.8.0+cpu"
    backends: dict[str, str] = field(default_factory=dict)
    denied: set[str] = field(default_factory=set)

    def write(self, path: str, text: str = "") -> None:
        """Write a file; without text, a stand-in for a device node or a folder's member."""
        place = self._place(path)
        place.write_text(text, encoding="utf-8")

    def folder(self, path: str) -> None:
        self._place(f"{path}/.").mkdir(exist_ok=True)

    def link(self, path: str, target: str) -> None:
        """Write a symbolic link; as in /sys, its target need not exist in a recording."""
        self._place(path).symlink_to(target)

    def add_nodes(self, *paths: str, denied: bool = False) -> None:
        """Device nodes, ``denied`` where this user may not open them."""
        for path in paths:
            self.write(path)
        if denied:
            self.denied.update(paths)

    def add_torch(self, version: str | None, **backends: str) -> None:
        """The installed torch, such as ``add_torch("2.8.0+cu128", cuda="12.8")``; ``None`` for none."""
        self.torch, self.backends = version, backends

    def add_pci(
        self,
        address: str,
        vendor: int,
        device: int,
        code: int,
        *,
        subsystem_vendor: int | None = None,
        subsystem: int = 0,
        numa_node: int = -1,
        driver: str | None = None,
        iommu_group: int | None = None,
    ) -> str:
        """A PCI function; ``code`` is the class code, such as 0x030200. Returns its folder.

        The attributes and what they mean: Linux, Documentation/ABI/testing/sysfs-bus-pci; how they are printed:
        drivers/pci/pci-sysfs.c ("0x%04x\\n" for ids, "0x%06x\\n" for the class, "%d\\n" for the node; uevent in
        pci_uevent of drivers/pci/pci-driver.c).
        """
        folder = f"/sys/bus/pci/devices/{address}"
        maker = vendor if subsystem_vendor is None else subsystem_vendor
        for name, value in (("vendor", vendor), ("device", device), ("subsystem_vendor", maker)):
            self.write(f"{folder}/{name}", f"0x{value:04x}\n")
        self.write(f"{folder}/subsystem_device", f"0x{subsystem:04x}\n")
        self.write(f"{folder}/class", f"0x{code:06x}\n")
        self.write(f"{folder}/numa_node", f"{numa_node}\n")
        lines = [f"DRIVER={driver}"] if driver else []
        lines += [
            f"PCI_CLASS={code:X}",
            f"PCI_ID={vendor:04X}:{device:04X}",
            f"PCI_SUBSYS_ID={maker:04X}:{subsystem:04X}",
            f"PCI_SLOT_NAME={address}",
            f"MODALIAS=pci:v{vendor:08X}d{device:08X}sv{maker:08X}sd{subsystem:08X}"
            f"bc{code >> 16:02X}sc{code >> 8 & 0xFF:02X}i{code & 0xFF:02X}",
        ]
        self.write(f"{folder}/uevent", "\n".join(lines) + "\n")
        if driver:
            self.link(f"{folder}/driver", f"../../../../bus/pci/drivers/{driver}")
        if iommu_group is not None:
            self.link(f"{folder}/iommu_group", f"../../../../kernel/iommu_groups/{iommu_group}")
        return folder

    def add_other_functions(self, count: int, domain: int = 0) -> None:
        """Root ports, bridges and network functions, as any server has: noise to a probe."""
        for index in range(count):
            bus, slot = 0x80 + index // 32, index % 32
            vendor, device, code, driver = _OTHER_FUNCTIONS[index % len(_OTHER_FUNCTIONS)]
            node = index * NUMA_NODES // count
            self.add_pci(
                f"{domain:04x}:{bus:02x}:{slot:02x}.0",
                vendor,
                device,
                code,
                numa_node=node,
                driver=driver,
            )

    def add_cpu(
        self,
        model: str = "Intel(R) Xeon(R) Platinum 8480+",
        flags: str = "fpu sse4_2 avx avx2 avx512f avx512_bf16 avx512_vnni amx_bf16 amx_tile amx_int8",
        *,
        processors: int = 4,
        memory_kib: int = 2113442188,
    ) -> None:
        """An x86 host. Formats: Linux, arch/x86/kernel/cpu/proc.c and fs/proc/meminfo.c."""
        blocks = (
            f"processor\t: {index}\nmodel name\t: {model}\nflags\t\t: {flags}\n"
            for index in range(processors)
        )
        self.write("/proc/cpuinfo", "\n".join(blocks) + "\n")
        self.write(
            "/proc/meminfo",
            f"MemTotal:       {memory_kib:8} kB\nMemFree:        {memory_kib // 2:8} kB\n",
        )

    def save(self) -> None:
        """Write ``machine.json``, which makes the tree a recorded machine."""
        torch = {"version": self.torch, "backends": self.backends} if self.torch else None
        data = {
            "environ": self.environ,
            "packages": self.packages,
            "torch": torch,
            "denied": sorted(self.denied),
        }
        self.write("/machine.json", json.dumps(data, indent=2) + "\n")

    def _place(self, path: str) -> Path:
        place = self.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        return place


Builder = Callable[[Tree], None]

_OTHER_FUNCTIONS = (
    (0x8086, 0x352A, 0x060400, "pcieport"),
    (0x15B3, 0x1021, 0x020700, "mlx5_core"),
    (0x1000, 0xC030, 0x060400, "pcieport"),
    (0x8086, 0x09A2, 0x088000, None),
)
"""Vendor, device, class, driver: PCI root port, ConnectX-7, PCIe switch, memory controller (ids of pci-ids)."""


def machines() -> dict[str, Builder]:
    """Every fixture machine: name to builder, collected from the modules of this folder."""
    found: dict[str, Builder] = {}
    for path in sorted(FOLDER.glob("*.py")):
        if path.name != Path(__file__).name:
            found.update(importlib.import_module(f"support.machines.{path.stem}").MACHINES)
    return found


def build(name: str, root: Path) -> Path:
    """Write the machine of a name to a folder that does not exist yet; returns the folder."""
    tree = Tree(root)
    machines()[name](tree)
    tree.save()
    return root


if __name__ == "__main__":
    sys.path.insert(
        0, str(FOLDER.parents[1])
    )  # where 'machines' is the folder's name, as in pyproject.toml
    if len(sys.argv) == 3:
        build(sys.argv[1], Path(sys.argv[2]))
    else:
        sys.stdout.write("\n".join([*machines(), ""]))
