"""The model runner and the attention of the engine on TPUs, with fixed shapes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.config import OpgraftConfig, ParallelConfig
from opgraft.distributed.groups import parallelism
from opgraft.distributed.lowering import with_torch_collectives
from opgraft.engine.runner.bucketed_runner import BucketedModelRunner
from opgraft.engine.runner.model_runner import ModelRunner
from opgraft.engine.runner.step_program import CacheOperators
from opgraft.engine.workers.rank_places import RankPlaces
from opgraft.engine.workers.worker import Worker
from opgraft.errors import ConfigError, PlatformError
from opgraft.ops.attention.decoder import Attention
from opgraft.ops.attention.padded import PaddedAttention
from opgraft.ops.embedding import VocabParallelEmbedding
from opgraft.ops.linear import ColumnParallelLinear, RowParallelLinear
from opgraft.platform import Platform
from opgraft.platforms.tpu.chips import one_chip
from opgraft.platforms.tpu.runtime import Runtime, RuntimeOwner
from opgraft.platforms.tpu.slices import WORKER_ID, host_number, slice_variables
from opgraft.plugins.selection import current_platform
from torch import Tensor, nn
from torch.fx import GraphModule

HEADS = 2
"""The dimension of the heads in a cache."""
PRIORITY = -1
"""Below the default, so that a plugin with a kernel for attention comes first."""


class TpuModelRunner(BucketedModelRunner):
    """Computes steps by programs of XLA. The programs write to the cache in place."""

    def __init__(self, opgraft_config: OpgraftConfig, device: torch.device) -> None:
        super().__init__(opgraft_config, device)
        self.runtime = runtime_of_platform()

    def lowered(self, program: GraphModule) -> GraphModule:
        # Compilers for TPUs know the collectives of torch only.
        return with_torch_collectives(program)

    def operators_of(self, cache: Tensor) -> CacheOperators:
        place: tuple[Any, ...] = ()
        if self._devices > 1:
            place = self.runtime.placing(cache.dim(), self._divided_dim(cache))
        return CacheOperators(self.runtime.donating(), place)

    def whole(self, dims: int) -> tuple[Any, ...]:
        if self._devices <= 1:
            return ()
        return self.runtime.placing(dims, None)

    @property
    def _devices(self) -> int:
        return self.opgraft_config.parallel.devices_per_rank or 1

    def _divided_dim(self, cache: Tensor) -> int | None:
        heads = cache.shape[HEADS]
        # Otherwise each device has the whole cache.
        return HEADS if heads % self._devices == 0 else None

    def load_model(self) -> None:
        """Make the model and read the weights. Divide shared weights among several devices."""
        super().load_model()
        if self._devices > 1:
            for tensor, dim in divided_weights(self.model, self._devices):
                self.runtime.shard(tensor, dim)

    def compilations(self) -> int:
        """Return the number of programs that XLA, or else the runner, has compiled here."""
        try:
            return self.runtime.compilations()
        # The package has no public count.
        except PlatformError:
            return super().compilations()

    def allocate_cache(self, num_blocks: int, num_states: int = 0) -> None:
        super().allocate_cache(num_blocks, num_states)
        if self._devices > 1:
            for cache in self.tensors:
                self.runtime.shard(cache, self._divided_dim(cache))
        # A program fills the cache. It runs now, so that it is no part of the first step.
        self.runtime.synchronize(self.device.index or 0)


class TpuWorker(Worker):
    """Has one chip, alone or as one of a slice, or all visible chips as one device."""

    @classmethod
    def expect_split(cls, parallel: ParallelConfig) -> None:
        """Check that the runtime can compute a split. Ranks share layers, one chip each.

        Raises:
            ConfigError: the runtime cannot.
        """
        why = _why_not_shared(parallel, runtime_of_platform())
        if why:
            sharing = parallel.tensor * parallel.pipeline
            chips = max(sharing, parallel.expert)
            raise ConfigError(
                f"parallel.tensor is {parallel.tensor}, parallel.pipeline {parallel.pipeline} and "
                f"parallel.expert {parallel.expert}, and {why}: set them to 1, and "
                f"parallel.devices_per_rank to {chips}, by which one process of torch_xla shares "
                "each layer among so many chips"
            )

    @classmethod
    def host_number(cls) -> int:
        """Return the number of this host in its slice."""
        return host_number(os.environ)

    @classmethod
    def enter_job(cls, places: RankPlaces) -> None:
        """Start the chip of this process as one of a slice.

        Raises:
            PlatformError: the processes are not those of a slice, or the runtime numbers them in
                another order.
        """
        variables = slice_variables(places, os.environ)
        os.environ.update(variables)
        runtime = runtime_of_platform()
        runtime.enter_job()
        number = runtime.number_in_slice()
        if number not in (None, places.rank):
            raise PlatformError(
                f"the runtime counts the process of rank {places.rank} as number {number} of the "
                "slice, and would send tensors to other ranks: start the hosts in the order of "
                f"their numbers, which {WORKER_ID} names"
            )

    def claim_devices(self) -> None:
        """Choose the chips of this process, before the runtime takes them.

        Raises:
            PlatformError: the package cannot use several chips as one device.
        """
        runtime = runtime_of_platform()
        if self.opgraft_config.parallel.devices_per_rank > 1:
            runtime.spread()
        # In a job, the process has entered a slice.
        elif self.local_size > 1 and parallelism().layout.world == 1:
            os.environ.update(one_chip(self.local_rank, os.environ))


def divided_weights(model: nn.Module, parts: int) -> Iterator[tuple[Tensor, int]]:
    """Yield the weights that tensor-parallel ranks would divide, each with the dimension.

    Each device has the whole weight if ``parts`` does not divide the size.
    """
    for layer in model.modules():
        if isinstance(layer, RowParallelLinear):
            name = "input_dim"
        elif isinstance(layer, (ColumnParallelLinear, VocabParallelEmbedding)):
            name = "output_dim"
        else:
            continue
        for parameter in layer.parameters(recurse=False):
            dim = vars(parameter).get(name)
            if dim is not None and parameter.shape[dim] % parts == 0:
                yield parameter, dim


def _why_not_shared(parallel: ParallelConfig, runtime: Runtime) -> str:
    """Return the reason why ranks cannot share a model so; empty if they can."""
    if parallel.pipeline > 1:
        return "a program has the whole model, and no stage of it"
    if parallel.tensor == 1 and parallel.expert == 1:
        return ""
    if parallel.devices_per_rank > 1:
        return "a process of several chips joins no other process"
    if parallel.expert > 1:
        return "ranks exchange rows of experts outside of programs"
    return runtime.why_alone()


def runtime_of_platform() -> Runtime:
    """Return the runtime of the current platform.

    Raises:
        PlatformError: the current platform is not for TPUs.
    """
    platform = current_platform()
    if not isinstance(platform, RuntimeOwner):
        raise PlatformError(
            f"this is for the platform tpu, and the current one is {platform.name}: set it by name"
        )
    return platform.runtime


def _is_tpu(platform: Platform) -> bool:
    return isinstance(platform, RuntimeOwner)


def register() -> None:
    """Declare the replacements. A second call changes nothing."""
    PluggableClass.register_oot(TpuModelRunner, name=ModelRunner, priority=PRIORITY, when=_is_tpu)
    PluggableClass.register_oot(TpuWorker, name=Worker, priority=PRIORITY, when=_is_tpu)
    CustomOp.register_oot(PaddedAttention, name=Attention, priority=PRIORITY, when=_is_tpu)
