"""The probe for CPUs, which reads ``/proc/cpuinfo`` and ``/proc/meminfo``."""

from __future__ import annotations

import re

from opgraft.machine.evidence import Device, Evidence, Fact
from opgraft.machine.host_memory import MEMINFO
from opgraft.machine.machine import Machine

CPUINFO = "/proc/cpuinfo"

FEATURES = (
    *(
        "avx2",
        "avx512f",
        "avx512_bf16",
        "avx512_fp16",
        "avx512_vnni",
        "amx_tile",
        "amx_bf16",
        "amx_int8",
    ),
    *("asimd", "sve", "bf16", "i8mm"),
)
"""The instruction sets that kernels care about, as x86 ``flags`` and Arm ``Features`` spell them."""


def probe(machine: Machine) -> Evidence:
    """Give evidence for the CPU; always available, with less detail where the files of Linux are missing."""
    cpuinfo = machine.read(CPUINFO)
    if not cpuinfo:
        return Evidence(True, "every machine has a CPU", facts=(Fact(CPUINFO, "not readable"),))
    name = _first(r"^model name[^\S\n]*:[^\S\n]*(.+)$", cpuinfo) or "CPU"
    features = features_of(cpuinfo)
    count = len(re.findall(r"^processor\s*:", cpuinfo, re.MULTILINE))
    memory = _first(r"^MemTotal:[^\S\n]*(\d{1,15}) kB$", machine.read(MEMINFO) or "")
    total = int(memory) * 1024 if memory else None
    device = Device(name, capability=" ".join(features) or None, memory=total)
    return Evidence(
        True, "every machine has a CPU", (device,), (Fact(CPUINFO, f"{count} processors"),)
    )


def features_of(cpuinfo: str) -> tuple[str, ...]:
    """Return the instruction sets of ``FEATURES`` that the first processor of a ``/proc/cpuinfo`` lists."""
    words = set((_first(r"^(?:flags|Features)[^\S\n]*:(.*)$", cpuinfo) or "").split())
    return tuple(feature for feature in FEATURES if feature in words)


def _first(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text, re.MULTILINE)
    return match.group(1).strip() if match else None
