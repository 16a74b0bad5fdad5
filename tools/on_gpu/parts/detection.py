"""Compare what opgraft says of the machine with torch and with ``nvidia-smi``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from opgraft.plugins.selection import current_platform

from on_gpu.device import ON_GPU
from on_gpu.machine import nvidia_smi
from on_gpu.rows import Rows, expect_equal

ANSWER_SECONDS = 20
MIB = 2**20

CONFUSABLE = 0.02
"""The share by which the memory of a device may differ between two sources: the driver keeps some for itself."""


def run(rows: Rows, bundle: Path) -> None:
    detected = _command(rows, "detect", "--all", "--json")
    _command(rows, "env", "--json")
    smi = nvidia_smi()
    if not smi and not ON_GPU:
        rows.no_device("facts of the device")
        return
    with rows.attempt("nvidia-smi and torch see as many devices") as row:
        expect_equal(torch.cuda.device_count(), len(smi), "torch's count")
        row.detail = f"{len(smi)}: {', '.join(device['name'] for device in smi)}"
    with rows.attempt("detect chooses cuda") as row:
        decision = detected["decision"]
        row.detail = decision["reason"]
        expect_equal(decision["chosen"], "cuda", "the choice")
    _compare_devices(rows, detected, smi)
    _compare_platform(rows)


def _command(rows: Rows, *arguments: str) -> dict[str, Any]:
    """Return what a command of opgraft answers, as data; nothing if it fails."""
    found: dict[str, Any] = {}
    with rows.attempt(f"opgraft {' '.join(arguments)}"):
        command = [sys.executable, "-m", "opgraft", *arguments]
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False
        )
        print(answer.stdout, answer.stderr)
        expect_equal(answer.returncode, 0, "the exit code")
        found.update(json.loads(answer.stdout))
    return found


def _compare_devices(rows: Rows, detected: dict[str, Any], smi: list[dict[str, str]]) -> None:
    """Compare each device of the evidence with the one of ``nvidia-smi`` in the same place."""
    devices: list[dict[str, Any]] = []
    with rows.attempt("detect lists every device"):
        candidates = detected["decision"]["candidates"]
        evidence = next(each["evidence"] for each in candidates if each["name"] == "cuda")
        devices = evidence["devices"]
        expect_equal(len(devices), len(smi), "the number of devices")
    for index, (device, told) in enumerate(zip(devices, smi, strict=False)):
        with rows.attempt(f"name of device {index}") as row:
            row.detail = device["name"]
            expect_equal(device["name"], told["name"], "the name")
        with rows.attempt(f"capability of device {index}") as row:
            row.detail = str(device["capability"])
            level = f"sm_{told['compute_cap'].replace('.', '')}"
            expect_equal(device["capability"], level, "the capability")
        with rows.attempt(f"memory of device {index}") as row:
            row.detail = f"{device['memory']} bytes, nvidia-smi {told['memory.total']} MiB"
            _expect_close(device["memory"], int(told["memory.total"]) * MIB, "the memory")
        with rows.attempt(f"driver of device {index}") as row:
            row.detail = str(device["driver"])
            expect_equal(device["driver"], f"nvidia {told['driver_version']}", "the driver")
        with rows.attempt(f"address of device {index}") as row:
            row.detail = str(device["pci_address"])
            # nvidia-smi writes the domain with eight digits, and letters in upper case.
            expect_equal(device["pci_address"], told["pci.bus_id"].lower()[4:], "the address")


def _compare_platform(rows: Rows) -> None:
    """Compare what the platform answers with torch."""
    platform = current_platform()
    with rows.attempt("the platform counts its devices without starting CUDA") as row:
        counted = platform.device_count()
        expect_equal(torch.cuda.is_initialized(), False, "whether CUDA was started")  # type: ignore[no-untyped-call]
        expect_equal(counted, torch.cuda.device_count(), "the count")
        row.detail = str(counted)
    with rows.attempt("capability of the platform") as row:
        capability = platform.capability(0)
        row.detail = str(capability)
        major, minor = torch.cuda.get_device_capability(0)
        expect_equal(capability.name, torch.cuda.get_device_name(0), "the name")
        expect_equal(capability.features, (f"sm_{major}{minor}",), "the features")
        has_bfloat16 = torch.bfloat16 in capability.dtypes
        expect_equal(has_bfloat16, torch.cuda.is_bf16_supported(False), "whether bfloat16 is there")
    with rows.attempt("memory of the platform") as row:
        memory = platform.memory(0)
        row.detail = f"{memory.free:,} of {memory.total:,} bytes are free"
        total = torch.cuda.get_device_properties(0).total_memory
        _expect_close(memory.total, total, "the total")
    with rows.attempt("the device computes"):
        ones = torch.ones(1024, device=platform.device_type)
        total_of_ones = float((ones + ones).sum())
        platform.synchronize(0)
        expect_equal(total_of_ones, 2048.0, "the sum")
    with rows.attempt("random numbers repeat with the seed of the platform"):
        drawn = []
        for _ in range(2):
            platform.manual_seed(7)
            drawn.append(torch.rand(8, device=platform.device_type))
        expect_equal(torch.equal(*drawn), True, "whether they are equal")


def _expect_close(found: int | None, expected: int, name: str) -> None:
    if found is None or abs(found - expected) > CONFUSABLE * expected:
        raise AssertionError(f"{name} is {found!r}, expected about {expected:,}")
