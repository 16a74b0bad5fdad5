"""``Worker``: one device with its model runner."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from opgraft.base.progress import progress_bar
from opgraft.base.text import described
from opgraft.binding.blame import replaced_among
from opgraft.binding.explaining import Explanation, explain
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.config import OpgraftConfig, ParallelConfig
from opgraft.distributed import get_tp_group
from opgraft.engine.runner.cache_layout import CacheSizes
from opgraft.engine.runner.context_fit import ContextFit
from opgraft.engine.runner.memory_query import MemoryQuery
from opgraft.engine.runner.model_runner import ModelRunner
from opgraft.engine.step import Step, StepResult
from opgraft.errors import ConfigError
from opgraft.logger import logger
from opgraft.models import TransformersModel
from opgraft.models.build import device_named
from opgraft.models.context import trained_context
from opgraft.models.pooling import pooled
from opgraft.models.through_transformers import GRAFT_INSTEAD
from opgraft.ops.attention.batch import AttentionBatch, attending
from opgraft.plugins.selection import current_platform
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

DEVICE_SHARE, HOST_SHARE = 0.9, 0.25
"""Of the free memory, for the cache: a device works for one process as a rule, the memory of a host is everybody's."""

_SMALL = 0.5
"""Of the memory for step and cache. If the largest step takes less by its bound, it is not computed to see."""


@PluggableClass.register("worker")
class Worker(PluggableClass):
    """Prepares a device, loads the model there, and computes steps.

    Args:
        opgraft_config: all settings; what it leaves open has the built-in default.
        local_rank: place among the workers of this host, which chooses the device where there are
            several.
        local_size: the number of workers of this host.
    """

    def __init__(
        self, opgraft_config: OpgraftConfig, local_rank: int = 0, local_size: int = 1
    ) -> None:
        self.opgraft_config = opgraft_config.resolved()
        self.local_rank = local_rank
        self.local_size = local_size
        self._paged = False

    @classmethod
    def expect_split(cls, parallel: ParallelConfig) -> None:
        """Refuse a split of the model that the devices cannot compute; called before any process starts.

        Raises:
            ConfigError: a process is to have several devices, which a subclass is for.
        """
        count = parallel.devices_per_rank
        if count > 1:
            raise ConfigError(
                f"parallel.devices_per_rank is {count}, and on the platform {current_platform().name} a process "
                "computes on one device: set parallel.tensor to share each layer among processes"
            )

    def claim_devices(self) -> None:
        """Set the process up for the devices that it is to have, before anything asks for one."""

    def init_device(self) -> None:
        """Choose the device, and seed its random numbers.

        Raises:
            ConfigError: there is no device for this worker, torch knows none of the name that is
                set, or one is set for several ranks.
        """
        self.claim_devices()
        platform, load = current_platform(), self.opgraft_config.load
        self.device = device_named(load.device or self._own_device())
        if self.device.index is not None and self.local_size > 1 and load.device:
            raise ConfigError(
                f"load.device is {load.device!r:.80}, one device for {self.local_size} ranks of this host: leave its "
                "number out, so that each rank has its own"
            )
        self.memory = MemoryQuery(self.device)
        platform.manual_seed(self.opgraft_config.model.seed)
        if self.device.index is not None:
            self.opgraft_config = replace(
                self.opgraft_config, load=replace(load, device=str(self.device))
            )
        self.runner = ModelRunner(self.opgraft_config, self.device)

    def _own_device(self) -> str:
        platform = current_platform()
        devices = platform.device_count()
        if devices < 2:
            return platform.device_type
        if self.local_rank >= devices:
            raise ConfigError(
                f"this host has {self.local_size} ranks and {devices} devices of {platform.name}: lower "
                "parallel.tensor or parallel.pipeline"
            )
        return f"{platform.device_type}:{self.local_rank}"

    def synchronize(self) -> None:
        """Wait until the device has computed what it was given."""
        current_platform().synchronize(self.device.index or 0)

    def load_model(self) -> CacheSizes:
        """Load the model; its layers say which cache they need."""
        self.runner.load_model()
        return self.runner.layout.sizes()

    def load_encoder(self) -> None:
        """Load the model for ``embed`` and prepare it, as ``ModelRunner.prepare_encoder`` says.

        Raises:
            ConfigError: it cannot be compiled.
        """
        self.runner.load_model()
        self.runner.prepare_encoder()

    def group_cache(self, windows: Sequence[int | None]) -> CacheSizes:
        """Put the layers into groups of these windows, which the stages of a pipeline share."""
        self.runner.layout = self.runner.layout.grouped(windows)
        return self.runner.layout.sizes()

    def max_context(self) -> int | None:
        """Return the tokens of the longest context; ``None`` where neither settings nor checkpoint say."""
        longest = int(self.runner.model.max_position)
        return None if longest == sys.maxsize else longest

    def trained_context(self) -> int | None:
        """Return the tokens of the longest context that the model was made for; ``None`` where its config says none."""
        config = self.runner.model.config
        return None if config is None else trained_context(config.get_text_config())

    def why_uncached(self) -> str:
        """Return the reason for a model of transformers to run without a cache, or an empty text."""
        model = self.runner.model
        if not isinstance(model, TransformersModel) or not model.uncached:
            return ""
        return f"{model.uncached}. {GRAFT_INSTEAD}"

    def context_fits(self) -> tuple[ContextFit, ...]:
        """Return which ropes of the model depend on the length of the context, and how."""
        return tuple(
            ContextFit(rope.trained_positions, rope.gradual)
            for rope in self.runner.model.fitted_ropes
        )

    def cache_bytes(self) -> int:
        """Return the bytes that the cache may take: as set, or a share of the memory that is free now.

        On a device that is not the host, what the largest step takes at its peak is subtracted. The
        share of the host's memory is small enough to leave room for every step.

        Raises:
            ConfigError: the platform does not know the memory of the device, or the largest step
                fails there.
        """
        cache = self.opgraft_config.cache
        if cache.memory_bytes is not None:
            return cache.memory_bytes
        free = self._free_memory()
        if self.memory.is_of_host:
            return int(free * (cache.memory_share or HOST_SHARE)) // self.local_size
        budget = int(free * (cache.memory_share or DEVICE_SHARE)) // self._sharing()
        return max(0, budget - self._peak(budget))

    def _sharing(self) -> int:
        """Return the number of workers of this host that share the memory of this one's device."""
        return (
            self.local_size
            if self.memory.is_of_host or current_platform().device_count() < 2
            else 1
        )

    def _free_memory(self) -> int:
        """Return the bytes that are free on the device, which may be another than the platform's."""
        free = self.memory.free()
        if free is None:
            platform = current_platform()
            raise ConfigError(
                f"the free memory of load.device={self.device} is not known, as the platform {platform.name} is for "
                f"{platform.device_type}: set cache.memory_bytes or cache.num_blocks"
            )
        return free

    def expect_memory(self, num_blocks: int, num_states: int) -> None:
        """Refuse a cache for which there is no memory: on a host the process would be killed once it is filled.

        Raises:
            ConfigError: it takes more than is free.
        """
        layout, free = self.runner.layout, self.memory.free()
        needed = num_blocks * layout.bytes_per_block + num_states * layout.bytes_per_state
        if free is not None and needed * self._sharing() > free:
            ranks = f" on each of {self._sharing()} ranks" if self._sharing() > 1 else ""
            raise ConfigError(
                f"the cache of {num_blocks:,} blocks and {num_states:,} states takes {needed:,} bytes{ranks}, and "
                f"{free:,} are free on {self.device}: lower cache.num_blocks, cache.memory_bytes or cache.num_states, "
                "or leave them out, so that it takes the share cache.memory_share of what is free"
            )

    def _peak(self, budget: int) -> int:
        """Return the bytes that the largest step takes at its peak, or a bound if that is small for the budget."""
        bound = self.runner.bound_of_largest_step()
        if bound is not None and bound < budget * _SMALL:
            size = f"{bound / 2**20:,.1f}"
            logger.info("the largest step takes less than %s MiB on %s", size, self.device)
            return bound
        try:
            peak = self._tried_peak()
            current_platform().synchronize(self.device.index or 0)
        except RuntimeError as error:  # torch's, such as one that is out of memory
            limits = self.opgraft_config.scheduler
            raise ConfigError(
                f"the largest step, of {limits.max_num_batched_tokens} tokens and {limits.max_num_seqs} sequences, "
                f"fails on {self.device}: {described(error)}. Lower scheduler.max_num_batched_tokens or "
                "scheduler.max_num_seqs, or set cache.memory_bytes to leave it out"
            ) from error
        logger.info("the largest step takes %s MiB on %s", f"{peak / 2**20:,.1f}", self.device)
        return peak

    def _tried_peak(self) -> int:
        """Compute the largest step to see the bytes that it takes, which may last a minute on a slow device."""
        limits = self.opgraft_config.scheduler
        words = (
            f"trial step of {limits.max_num_batched_tokens:,} tokens on {self.device}, for the size "
            "of the cache"
        )
        logger.info("%s", words)
        shown = None if self.opgraft_config.load.progress and self.local_rank == 0 else False
        with progress_bar(words, self.runner.calls_of_largest_step(), shown) as called:
            return self.runner.peak_of_largest_step(self._free_memory, lambda: called(1))

    def allocate_cache(self, num_blocks: int, num_states: int = 0) -> None:
        """Make the cache of that many blocks and states, and compile the model if ``compilation_config`` says so.

        Raises:
            ConfigError: the model cannot be compiled.
        """
        self.runner.allocate_cache(num_blocks, num_states)
        self.runner.compile_model()
        self._paged = True

    def embed(
        self, sequences: Sequence[Sequence[int]], pooling: Sequence[str], normalize: bool
    ) -> list[list[float]]:
        """Return a vector for each of some sequences, computed whole and without a cache.

        Args:
            sequences: token ids of each.
            pooling: names of ``opgraft.models.pooling.POOLINGS``.
            normalize: make the vectors of unit length.
        """
        states = self.runner.encode(sequences)
        mask = pad_sequence(
            [torch.ones(len(rows), device=rows.device) for rows in states], batch_first=True
        )
        vectors = pooled(pad_sequence(states, batch_first=True), mask, pooling)
        return (functional.normalize(vectors, dim=-1) if normalize else vectors).tolist()

    def wrong_kernel(self, sequences: Sequence[Sequence[int]]) -> str:
        """Encode sequences once more, and return what ``culprit_of`` says."""
        return self.runner.wrong_kernel(sequences)

    def replaced_class(self) -> str:
        """Name a class of a plugin that replaces a part of the engine as a whole; empty if none does."""
        return replaced_among([self]) or self.runner.replaced_class()

    def explain(self) -> Explanation:
        """Tell which kernel each op of the model is bound to as the engine calls it, and which classes are in use."""
        batch = AttentionBatch.of_sequences([], block_size=self.runner.layout.block_size)
        with attending(batch) if self._paged else nullcontext():
            explained = explain(self.runner.model)
        communicator = get_tp_group().communicator
        others: dict[str, object] = {} if communicator is None else {"communicator": communicator}
        if self._paged:  # an encoder has no cache to size and draws no tokens
            others |= {"memory_query": self.memory, "sampler": self.runner.sampler}
        if self.runner.compiled is not None:
            others["attention_nodes"] = self.runner.compiled.nodes
        return explained.within(
            worker=self,
            model_runner=self.runner,
            **others,
        )

    def execute(self, step: Step) -> StepResult:
        """Compute a step."""
        return self.runner.execute(step)
