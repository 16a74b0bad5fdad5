"""The two packages that give PyTorch a TPU device, and which of them fits the installed torch. Metadata only."""

from __future__ import annotations

import re
from dataclasses import dataclass

from opgraft.machine.evidence import Fact
from opgraft.machine.machine import Machine

Release = tuple[int, ...]


@dataclass(frozen=True)
class RuntimePackage:
    """One row of the table.

    Attributes:
        name: the distribution.
        series: the versions of it that this row describes, such as 2.9, all of its patch releases.
        oldest, newest: the versions of torch that those were built for; as many parts count as are given.
        device_type: the ``torch.device`` type that it adds.
        compile_backend: the ``torch.compile`` backend that it adds.
        distributed_backend: the ``torch.distributed`` backend that it adds.
        runtime: dotted path ``package.module:Class`` of our ``Runtime``, imported once the platform is selected.
        only_vfio: whether it sees chips below ``/dev/vfio`` only.
        xla_clients: whether PJRT_DEVICE makes it use another device than a TPU.
    """

    name: str
    series: Release
    oldest: Release
    newest: Release
    device_type: str
    compile_backend: str
    distributed_backend: str
    runtime: str
    only_vfio: bool = False
    xla_clients: bool = False

    @property
    def torch(self) -> str:
        """The versions of torch that it was built for, in words."""
        return (
            _text(self.oldest)
            if self.oldest == self.newest
            else f"{_text(self.oldest)} to {_text(self.newest)}"
        )

    def fits(self, torch: str | None) -> bool:
        """Tell whether it was built for a version of torch."""
        release = _release(torch)
        return (
            bool(release) and self.oldest <= release and release[: len(self.newest)] <= self.newest
        )


PACKAGES = (
    # torch_xla declares no requirement on torch but is bound to one ABI: 2.9 with torch 2.13 ends in undefined symbols
    RuntimePackage(
        name="torch_xla",
        series=(2, 9),
        oldest=(2, 9),
        newest=(2, 9),
        device_type="xla",
        compile_backend="openxla",
        distributed_backend="xla",
        runtime="opgraft.platforms.tpu.xla:Xla",
        xla_clients=True,
    ),
    # From the metadata of torch_tpu 0.2.0. It counts a chip only if /dev/vfio/<iommu group> exists.
    RuntimePackage(
        name="torch_tpu",
        series=(0, 2),
        oldest=(2, 11),
        newest=(2, 15, 0),
        device_type="tpu",
        compile_backend="tpu",
        distributed_backend="tpu_dist",
        runtime="opgraft.platforms.tpu.torch_tpu:TorchTpu",
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
    """Choose the first package of the table that is installed and fits the installed torch."""
    build = machine.torch_build()
    torch = build.version if build else None
    installed = f"torch {torch}" if torch else "no torch"
    facts = [Fact("package torch", torch or "not installed")]
    for package in PACKAGES:
        version = machine.version_of(package.name)
        if version is None:
            facts.append(
                Fact(f"package {package.name}", f"not installed (for torch {package.torch})")
            )
        elif _release(version)[: len(package.series)] != package.series:
            facts.append(
                Fact(
                    f"package {package.name}",
                    f"{version} is not known here, {_text(package.series)} is",
                )
            )
        elif not package.fits(torch):
            facts.append(
                Fact(f"package {package.name}", f"{version} was built for torch {package.torch}")
            )
        else:
            says = f"{version} fits: device {package.device_type}, compile backend {package.compile_backend}"
            return Choice(
                installed, package, version, (*facts, Fact(f"package {package.name}", says))
            )
    return Choice(installed, None, "", tuple(facts), _remedy(torch))


def _remedy(torch: str | None) -> str:
    fitting = [package for package in PACKAGES if package.fits(torch)]
    if fitting:
        return f"install {fitting[0].name} {_text(fitting[0].series)}, which is built for torch {fitting[0].torch}"
    pairs = (
        f"torch {package.torch} with {package.name} {_text(package.series)}" for package in PACKAGES
    )
    return f"install {' or '.join(pairs)}"


def _release(version: str | None) -> Release:
    """Return the numbers that a version begins with; none where it does not begin with any."""
    found = re.match(r"\d{1,4}(\.\d{1,4}){0,3}", version or "", re.ASCII)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _text(release: Release) -> str:
    return ".".join(map(str, release))
