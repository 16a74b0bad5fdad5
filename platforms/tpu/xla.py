"""torch_xla: tensors of the type ``xla`` record operations, and run them at the first read."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as metrics
import torch_xla.runtime
from opgraft.platform import DeviceMemory
from opgraft.platforms.tpu.runtime import Runtime
from torch import Tensor


class Xla(Runtime):
    """The calls of torch_xla 2.9."""

    def device_count(self) -> int:
        return int(torch_xla.device_count())

    def memory(self, index: int) -> DeviceMemory:
        # XLA's CPU client keeps no account of its memory.
        if self.on_cpu():
            page = os.sysconf("SC_PAGE_SIZE")
            total = os.sysconf("SC_PHYS_PAGES") * page
            return DeviceMemory(total, os.sysconf("SC_AVPHYS_PAGES") * page)
        info = xm.get_memory_info(torch_xla.device(index))
        total = info["bytes_limit"]
        return DeviceMemory(total, total - info["bytes_used"])

    def synchronize(self, index: int) -> None:
        torch_xla.sync(wait=True)
        # Of all devices, because torch_xla has other names for them here.
        xm.wait_device_ops()

    def manual_seed(self, seed: int) -> None:
        for index in range(self.device_count()):
            torch_xla.manual_seed(seed, torch_xla.device(index))

    def compilations(self) -> int:
        # A tuple: number of samples, sum, last samples.
        data = metrics.metric_data("CompileTime")
        return int(data[0]) if data else 0

    def donating(self) -> tuple[Any, ...]:
        return torch.ops.xla.dynamo_set_buffer_donor_.default, True

    def spread(self) -> None:
        if not torch_xla.runtime.is_spmd():
            torch_xla.runtime.use_spmd()

    def shard(self, tensor: Tensor, dim: int | None) -> None:
        spec = _spec(tensor.dim(), dim)
        _spmd().mark_sharding(tensor, _mesh(), spec)

    def placing(self, dims: int, dim: int | None) -> tuple[Any, ...]:
        # The operator takes texts, because a graph holds no mesh.
        mesh = str(_mesh())
        spec = str(_spec(dims, dim))
        return torch.ops.xla.aot_mark_sharding.default, mesh, spec

    def why_alone(self) -> str:
        return "XLA's CPU client joins no other process" if self.on_cpu() else ""

    def enter_job(self) -> None:
        # Registers the backend of torch.distributed.
        importlib.import_module("torch_xla.distributed.xla_backend")
        # Without a replication, collectives would sum over this process alone.
        xm.set_replication(torch_xla.device(), xm.get_xla_supported_devices())

    def number_in_slice(self) -> int:
        return int(torch_xla.runtime.global_ordinal())

    def on_cpu(self) -> bool:
        return bool(torch_xla.runtime.device_type() == "CPU")


def _spmd() -> Any:
    # The import is slow, and needed for several devices only.
    return importlib.import_module("torch_xla.distributed.spmd")


def _mesh() -> Any:
    devices = torch_xla.runtime.global_runtime_device_count()
    return _spmd().Mesh(list(range(devices)), (devices,), ("tensor",))


def _spec(dims: int, dim: int | None) -> tuple[str | None, ...]:
    return tuple("tensor" if each == dim else None for each in range(dims))
