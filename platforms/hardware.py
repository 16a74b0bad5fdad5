"""Hardware without a built-in platform, by PCI ids, and by device nodes on machines without PCI.

Nodes such as ``/dev/accel*`` belong to several vendors and are never asked. Sources of ids: pci.ids
(https://pci-ids.ucw.cz), the drivers habanalabs and ivpu (drivers/accel of Linux,
HabanaAI/hl-thunk), Huawei's npu-driver installer (PCIE_BDF_310 and its siblings). Sources of
classes: the detectors of gpustack/runtime. More sources stand beside the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from opgraft.machine.evidence import Sighting
from opgraft.machine.machine import Machine
from opgraft.platforms.pci import FOLDER, PciFunction, pci_functions

DISPLAY = 0x03
PROCESSOR = 0x0B
ACCELERATOR = 0x12
MOST_NODES = 64
MACOS = "/System/Library/CoreServices/SystemVersion.plist"


@dataclass(frozen=True)
class DeviceKind:
    """One row of the table.

    Attributes:
        name: the name of a device with an id outside of ``models``.
        vendor: PCI vendor id.
        classes: upper bytes of the PCI class of processing functions. Other functions do not count.
        served_by: the software that makes a PyTorch device of the hardware.
        models: device id → name.
        only_models: functions with other ids do not count.
        nodes: the beginning of the names of device nodes below /dev, if PCI may not show the
            devices.
    """

    name: str
    vendor: int
    classes: frozenset[int]
    served_by: str
    models: Mapping[int, str] = field(default_factory=dict)
    only_models: bool = False
    nodes: str = ""


_GPU = frozenset({DISPLAY, ACCELERATOR})
_NPU = frozenset({ACCELERATOR})

KINDS: Sequence[DeviceKind] = (
    # Class 03 of this vendor is the board management controller's VGA (pci.ids: 1711). a127 is
    # another accelerator.
    DeviceKind(
        "Huawei Ascend",
        0x19E5,
        _NPU,
        "torch_npu (device npu)",
        {
            0xD100: "Huawei Ascend 310",
            0xD500: "Huawei Ascend 310P",
            0xD801: "Huawei Ascend 910",
            0xD802: "Huawei Ascend 910B",
            0xD803: "Huawei Ascend 910C",
        },
        only_models=True,
        nodes="davinci",
    ),
    DeviceKind(
        "Intel Gaudi",
        0x1DA3,
        _NPU,
        "Intel's bridge habana_frameworks.torch (device hpu)",
        {
            0x0001: "Habana Goya",
            0x0030: "Habana Greco",
            **dict.fromkeys((0x1020, 0x1021, 0x1030), "Intel Gaudi 2"),
            **dict.fromkeys(range(0x1060, 0x1070), "Intel Gaudi 3"),
        },
    ),
    DeviceKind(
        "Intel NPU",
        0x8086,
        _NPU,
        "OpenVINO (PyTorch has no device for it)",
        dict.fromkeys((0x7D1D, 0xAD1D, 0x643E, 0xB03E), "Intel NPU"),
        only_models=True,
    ),
    DeviceKind("MetaX GPU", 0x9999, _GPU, "MetaX's build of torch for MACA (device cuda)"),
    DeviceKind("Moore Threads GPU", 0x1ED5, _GPU, "torch_musa (device musa)"),
    DeviceKind("Cambricon MLU", 0xCABC, _GPU, "torch_mlu (device mlu)"),
    # Hygon's CPUs share the vendor id. DCUs are display controllers or co-processors (0b40), as
    # PaddlePaddle's guide for K100_AI finds them: lspci | grep -i -E "disp|co-pro".
    DeviceKind(
        "Hygon DCU", 0x1D94, _GPU | {PROCESSOR}, "Hygon's build of torch for DTK (device cuda)"
    ),
    DeviceKind("Iluvatar GPU", 0x1E3E, _GPU, "Iluvatar's build of torch for CoreX (device cuda)"),
)


def sightings(machine: Machine) -> Iterator[Sighting]:
    """Yield the hardware of the table on a machine, by kind."""
    for kind in KINDS:
        remedy = _remedy(kind.served_by)
        addresses = _addresses_by_name(machine, kind)
        for name, of_name in addresses.items():
            yield Sighting(name, len(of_name), FOLDER, tuple(of_name), remedy)
        # In a container the nodes may be there without PCI functions.
        if not addresses and kind.nodes:
            yield from _by_node(machine, kind)
    # macOS has neither PCI functions nor device nodes in files.
    if machine.exists(MACOS) and not machine.exists("/proc"):
        yield Sighting("Apple GPU", 1, MACOS, (), _remedy("PyTorch itself (device mps)"))


def _addresses_by_name(machine: Machine, kind: DeviceKind) -> dict[str, list[str]]:
    """Return the PCI addresses of the devices of a kind, by the names of the devices."""
    addresses: dict[str, list[str]] = {}
    for function in pci_functions(machine, kind.vendor):
        if _is_one(kind, function):
            name = kind.models.get(function.device, kind.name)
            addresses.setdefault(name, []).append(function.address)
    return addresses


def _is_one(kind: DeviceKind, function: PciFunction) -> bool:
    if function.kind not in kind.classes:
        return False
    return not kind.only_models or function.device in kind.models


def _by_node(machine: Machine, kind: DeviceKind) -> Iterator[Sighting]:
    found = []
    # Not by a list of /dev: a container may hold nodes that nobody may list.
    for number in range(MOST_NODES):
        node = f"/dev/{kind.nodes}{number}"
        if machine.exists(node):
            found.append(node)
    if found:
        remedy = _remedy(kind.served_by)
        yield Sighting(kind.name, len(found), source=found[0], addresses=(), remedy=remedy)


def _remedy(served_by: str) -> str:
    plugin = "install a plugin that offers it as a platform of opgraft, or write one"
    return f"served by {served_by}; {plugin}"
