"""Facts of the machine for the head of the report, without torch."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("torch", "triton", "transformers", "opgraft")
FIELDS = ("name", "memory.total", "compute_cap", "driver_version", "pci.bus_id")
"""Fields of ``nvidia-smi``; the memory is in MiB."""


def nvidia_smi(seconds: float = 15.0) -> list[dict[str, str]]:
    """Return the fields of each GPU, by name; none if the tool is missing or does not answer in time."""
    query = f"--query-gpu={','.join(FIELDS)}"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    lines = [line.split(", ") for line in answer.stdout.splitlines() if line.strip()]
    return [dict(zip(FIELDS, line, strict=False)) for line in lines]


def facts() -> dict[str, str]:
    """Return date, device, driver and versions."""
    found = nvidia_smi()
    device = found[0] if found else {}
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "device": device.get("name", "no device"),
        "driver": device.get("driver_version", "none"),
        "system": f"{platform.release()}, {os.cpu_count()} processors",
        "Python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
