"""The probe for CPUs. It reads ``/proc/cpuinfo`` and ``/proc/meminfo``."""

from __future__ import annotations

import re

from opgraft.machine.evidence import Device, Evidence, Fact
from opgraft.machine.host_cpu import CPUINFO, features_of, first
from opgraft.machine.host_memory import MEMINFO
from opgraft.machine.machine import Machine


def probe(machine: Machine) -> Evidence:
    """Return evidence for the CPU: available, with less detail if files are missing."""
    reason = "every machine has a CPU"
    cpuinfo = machine.read(CPUINFO)
    if not cpuinfo:
        exists = machine.exists(CPUINFO)
        why = "could not be read" if exists else "could not be read: it does not exist"
        return Evidence(True, reason, facts=(Fact(CPUINFO, why),))
    name = first(r"^model name[^\S\n]*:[^\S\n]*(.+)$", cpuinfo) or "CPU"
    features = features_of(cpuinfo)
    count = len(re.findall(r"^processor\s*:", cpuinfo, re.MULTILINE))
    memory = first(r"^MemTotal:[^\S\n]*(\d{1,15}) kB$", machine.read(MEMINFO) or "")
    total = int(memory) * 1024 if memory else None
    device = Device(name, capability=" ".join(features) or None, memory=total)
    return Evidence(True, reason, (device,), (Fact(CPUINFO, f"{count} processors"),))
