"""The two packages that give PyTorch a TPU device, and which of them fits the installed torch. Metadata only."""

from __future__ import annotations

from dataclasses import dataclass

from opgraft.evidence import Fact
from opgraft.machine import Machine
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version


@dataclass(frozen=True)
class RuntimePackage:
    """One row of the table.

    Attributes:
        name: the distribution.
        versions: the versions of it that this row describes.
        torch: the versions of torch that those were built for.
        device_type: the ``torch.device`` type that it adds.
        compile_backend: the ``torch.compile`` backend that it adds.
        distributed_backend: the ``torch.distributed`` backend that it adds.
        adapter: dotted path ``package.module:Class`` of our adapter, imported once the platform is selected.
        only_vfio: whether it sees chips below ``/dev/vfio`` only.
        xla_clients: whether PJRT_DEVICE makes it use another device than a TPU.
    """

    name: str
    versions: str
    torch: str
    device_type: str
    compile_backend: str
    distributed_backend: str
    adapter: str
    only_vfio: bool = False
    xla_clients: bool = False


PACKAGES = (
    # torch_xla declares no requirement on torch but is bound to one ABI: 2.9 with torch 2.13 ends in undefined symbols
    RuntimePackage(
        name="torch_xla",
        versions="==2.9.*",
        torch="==2.9.*",
        device_type="xla",
        compile_backend="openxla",
        distributed_backend="xla",
        adapter="opgraft.platforms.tpu.xla:Xla",
        xla_clients=True,
    ),
    # From the metadata of torch_tpu 0.2.0. It counts a chip only if /dev/vfio/<iommu group> exists.
    RuntimePackage(
        name="torch_tpu",
        versions=">=0.2,<0.3",
        torch=">=2.11.0,<=2.15.0",
        device_type="tpu",
        compile_backend="tpu",
        distributed_backend="tpu_dist",
        adapter="opgraft.platforms.tpu.torch_tpu:TorchTpu",
        only_vfio=True,
    ),
)


@dataclass(frozen=True)
class Choice:
    """The package that fits ``torch``, or ``None``; ``facts`` say why for each, and ``remedy`` what to install."""

    torch: str
    package: RuntimePackage | None
    version: str
    facts: tuple[Fact, ...]
    remedy: str = ""


def choose(machine: Machine) -> Choice:
    """The first package of the table that is installed and fits the installed torch."""
    build = machine.torch_build()
    torch = build.version if build else None
    installed = f"torch {torch}" if torch else "no torch"
    facts = [Fact("package torch", torch or "not installed")]
    for package in PACKAGES:
        version = machine.version_of(package.name)
        if version is None:
            facts.append(Fact(f"package {package.name}", f"not installed (for torch {package.torch})"))
        elif not _within(version, package.versions):
            facts.append(Fact(f"package {package.name}", f"{version} is not known here ({package.versions} is)"))
        elif not _within(torch, package.torch):
            facts.append(Fact(f"package {package.name}", f"{version} was built for torch {package.torch}"))
        else:
            says = f"{version} fits: device {package.device_type}, compile backend {package.compile_backend}"
            return Choice(installed, package, version, (*facts, Fact(f"package {package.name}", says)))
    return Choice(installed, None, "", tuple(facts), _remedy(torch))


def _remedy(torch: str | None) -> str:
    fitting = [package for package in PACKAGES if _within(torch, package.torch)]
    if fitting:
        return f"install {fitting[0].name} {fitting[0].versions}, which is built for torch {fitting[0].torch}"
    pairs = " or ".join(f"torch {package.torch} with {package.name} {package.versions}" for package in PACKAGES)
    return f"install {pairs}"


def _within(version: str | None, specifier: str) -> bool:
    try:
        return version is not None and SpecifierSet(specifier).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False
