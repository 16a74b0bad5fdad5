"""What opgraft uses of torch_tpu 0.2.0, on a simulated slice.

As the real one does, it reads its environment once, when the device is first used, and then meets the other processes
of the slice at the addresses that the environment names. It refuses what libtpu refuses: a list of addresses that does
not fit the topology, a process at another address than its own, a chip that two processes have.
"""

from __future__ import annotations

import functools
import json
import math
import os
import socket
import time
from typing import Any

import torch
from opgraft.compat.python_device import register_device
from opgraft.testing import devices
from torch import distributed as dist

devices.DEVICE_TYPE = "tpu"

from opgraft.platforms.tpu.platform import TpuPlatform  # noqa: E402
from opgraft.testing import simulated_tensors  # noqa: E402

PATIENCE = 60.0
KNOWN = ("aten", "prims", "_c10d_functional")
"""The operators that the compiler lowers."""


class SlicePlatform(TpuPlatform):
    @property
    def name(self) -> str:
        return "slice"


@functools.cache
def slice_of_environment() -> list[tuple[int, str]] | None:
    """Meet the other processes. Return number and chip of each; ``None`` for a process alone."""
    read = os.environ.get
    addresses = [each for each in read("TORCH_TPU_SLICEBUILDER_ADDRESSES", "").split(",") if each]
    mesh = [int(each) for each in read("TORCH_TPU_TOPOLOGY", "1,1,1").split(",")]
    chips = read("TPU_VISIBLE_CHIPS", "").split(",")
    if not addresses:
        return None
    if math.prod(mesh) != len(addresses) or int(read("WORLD_SIZE", "1")) != len(addresses):
        raise RuntimeError(
            "TPU initialization failed: Invalid --deepsea_slice_builder_worker_addresses specified. "
            f"Expected {math.prod(mesh)} worker addresses, got {len(addresses)}."
        )
    bounds = [read("TPU_PROCESS_BOUNDS"), read("TPU_HOST_BOUNDS"), read("TORCH_TPU_TOPOLOGY")]
    on_each = [read("TPU_CHIPS_PER_PROCESS_BOUNDS"), read("TPU_CHIPS_PER_HOST_BOUNDS"), "1,1,1"]
    if len(set(bounds)) > 1 or len(set(on_each)) > 1 or len(chips) != 1:
        raise RuntimeError(f"bounds {bounds} of processes and {on_each} of chips, with {chips}")
    rank = int(read("RANK", "-1"))
    own = addresses[rank]
    if read("CLOUD_TPU_TASK_ID") != str(rank) or own.rpartition(":")[2] != read("TPU_PROCESS_PORT"):
        raise RuntimeError(f"task {read('CLOUD_TPU_TASK_ID')} of rank {rank} is not at {own}")
    if read("TPU_PROCESS_ADDRESSES") != ",".join(addresses):
        raise RuntimeError("TPU_PROCESS_ADDRESSES has other addresses")
    return met(addresses, rank, chips[0])


def met(addresses: list[str], rank: int, chip: str) -> list[tuple[int, str]]:
    """Tell the others number and chip, and hear theirs."""
    host, _, port = addresses[rank].rpartition(":")
    found = {rank: (rank, chip)}
    with socket.create_server((host, int(port)), backlog=len(addresses)) as listening:
        listening.settimeout(PATIENCE)
        for other in addresses[:rank]:
            with connected(other) as connection:
                connection.sendall(json.dumps([rank, chip]).encode() + b"\n")
                number, theirs = json.loads(connection.makefile().readline())
                found[number] = (number, theirs)
        while len(found) < len(addresses):
            connection, _ = listening.accept()
            with connection:
                number, theirs = json.loads(connection.makefile().readline())
                found[number] = (number, theirs)
                connection.sendall(json.dumps([rank, chip]).encode() + b"\n")
    seats = [(addresses[number].rpartition(":")[0], theirs) for number, theirs in found.values()]
    if len(set(seats)) < len(seats):
        raise RuntimeError(f"two processes have one chip: {sorted(seats)}")
    return [found[number] for number in sorted(found)]


def connected(address: str) -> socket.socket:
    """Connect to a process that may not listen yet."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return socket.create_connection((host, int(port)), PATIENCE)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def compute(operator: Any, *args: Any, **kwargs: Any) -> Any:
    slice_of_environment()
    return simulated_tensors.compute(operator, *args, **kwargs)


def create_process_group(store: Any, rank: int, size: int, timeout: Any) -> Any:
    """Return the link between the chips of a slice. The numbers of a simulated chip are in the host."""
    chips = slice_of_environment()
    if chips is None:
        raise RuntimeError(
            "tpu_dist: TORCH_TPU_SLICEBUILDER_ADDRESSES and TORCH_TPU_TOPOLOGY are not set"
        )
    if size > len(chips):
        raise RuntimeError(f"tpu_dist: {size} ranks, and the slice has {len(chips)} chips")
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def compiled(program: Any, *, backend: str, **options: Any) -> Any:
    """Compile a program, which calls operators of torch alone. Dynamo follows no simulated tensor.

    torch_tpu puts a function of its own in the place of ``torch.compile``, too.
    """
    if backend != "tpu":
        return compile_of_torch(program, backend=backend, **options)
    for node in program.graph.nodes:
        namespace = getattr(node.target, "namespace", "aten")
        if namespace not in KNOWN:
            raise RuntimeError(f"no lowering of {node.target}")
    return program


register_device("tpu", compute)
simulated_tensors.begin(devices.SimulatedDevice("Google TPU"))
torch.accelerator.device_count = lambda: 1
torch.accelerator.synchronize = lambda device=None, /: None
torch.accelerator.get_memory_info = lambda device_index=None, /: (1 << 30, 1 << 31)
dist.Backend.register_backend("tpu_dist", create_process_group, devices=["tpu"])
compile_of_torch, torch.compile = torch.compile, compiled
