"""The two packages with a TPU device for PyTorch, and the choice by metadata."""

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
        series: the versions of the distribution, such as 2.9 for all patch releases of 2.9.
        oldest, newest: the versions of torch for the series. Only the given parts count.
        device_type: the ``torch.device`` type of the package.
        compile_backend: the ``torch.compile`` backend of the package.
        distributed_backend: the ``torch.distributed`` backend of the package.
        runtime: dotted path ``package.module:Class`` of our ``Runtime``. It is imported after the
            platform is selected.
        only_vfio: the package sees chips below ``/dev/vfio`` only.
        xla_clients: the package uses another device if PJRT_DEVICE names one.
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
        """The versions of torch for the package, in words."""
        if self.oldest == self.newest:
            return _text_of_release(self.oldest)
        return f"{_text_of_release(self.oldest)} to {_text_of_release(self.newest)}"

    def fits(self, torch: str | None) -> bool:
        """Return True if the package was built for a version of torch."""
        release = _release(torch)
        if not release:
            return False
        compared = release[: len(self.newest)]
        return self.oldest <= release and compared <= self.newest


PACKAGES = (
    # torch_xla declares no requirement on torch, but has the ABI of one version: torch_xla 2.9 with
    # torch 2.13 ends in undefined symbols.
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
        # Objects of ranks go through the hosts, tensors between chips.
        distributed_backend="cpu:gloo,tpu:tpu_dist",
        runtime="opgraft.platforms.tpu.torch_tpu:TorchTpu",
        only_vfio=True,
    ),
)


@dataclass(frozen=True)
class Choice:
    """The choice of a package.

    Attributes:
        torch: the installed torch, in words.
        package: the package for this torch, or ``None``.
        version: of the package.
        facts: a reason for or against each package.
        remedy: the package to install, if none fits.
    """

    torch: str
    package: RuntimePackage | None
    version: str
    facts: tuple[Fact, ...]
    remedy: str = ""


def choose(machine: Machine) -> Choice:
    """Choose the first installed package of the table that fits the installed torch."""
    build = machine.torch_build()
    torch = build.version if build else None
    installed = f"torch {torch}" if torch else "no torch"
    facts = [Fact("package torch", torch or "not installed")]
    for package in PACKAGES:
        version = machine.version_of(package.name)
        objection = _objection(package, version, torch)
        source = f"package {package.name}"
        if objection is None and version is not None:
            device = f"device {package.device_type}"
            fits = f"{version} fits: {device}, compile backend {package.compile_backend}"
            facts.append(Fact(source, fits))
            return Choice(installed, package, version, tuple(facts))
        facts.append(Fact(source, objection or ""))
    return Choice(installed, None, "", tuple(facts), _remedy(torch))


def _objection(package: RuntimePackage, version: str | None, torch: str | None) -> str | None:
    """Return the reason against an installed version of a package, or ``None``."""
    if version is None:
        return f"not installed (for torch {package.torch})"
    if _release(version)[: len(package.series)] != package.series:
        return f"{version} is not known here, {_text_of_release(package.series)} is"
    if not package.fits(torch):
        return f"{version} was built for torch {package.torch}"
    return None


def _remedy(torch: str | None) -> str:
    for package in PACKAGES:
        if package.fits(torch):
            name = f"{package.name} {_text_of_release(package.series)}"
            return f"install {name}, which is built for torch {package.torch}"
    pairs = (
        f"torch {package.torch} with {package.name} {_text_of_release(package.series)}"
        for package in PACKAGES
    )
    return f"install {' or '.join(pairs)}"


def _release(version: str | None) -> Release:
    """Return the numbers at the beginning of a version; empty without any."""
    found = re.match(r"\d{1,4}(\.\d{1,4}){0,3}", version or "", re.ASCII)
    if not found:
        return ()
    return tuple(int(part) for part in found[0].split("."))


def _text_of_release(release: Release) -> str:
    return ".".join(map(str, release))
