"""``Worker``: one device with its model runner."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from opgraft.base.log import logger
from opgraft.base.progress import progress_bar
from opgraft.base.text import described
from opgraft.binding.blame import replaced_among
from opgraft.binding.explaining import Explanation, explain
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.compilation.key import origin_of_numbers
from opgraft.config import OpgraftConfig, ParallelConfig
from opgraft.distributed import get_tp_group
from opgraft.engine.lora.adapters import LoRAReport
from opgraft.engine.lora.request import LoRARequest
from opgraft.engine.runner.cache_layout import CacheSizes
from opgraft.engine.runner.context_fit import ContextFit
from opgraft.engine.runner.memory_query import MemoryQuery
from opgraft.engine.runner.model_runner import ModelRunner
from opgraft.engine.runner.recorded_steps import blocks_of_padding
from opgraft.engine.runner.stored_blocks import StoredBlocks
from opgraft.engine.step import Step, StepResult
from opgraft.engine.workers.rank_places import RankPlaces
from opgraft.errors import ConfigError
from opgraft.models import TransformersModel
from opgraft.models.build import device_named
from opgraft.models.context import trained_context
from opgraft.models.files import digest_of_checkpoint, state_of_checkpoint
from opgraft.models.model import HasLabels
from opgraft.models.pooling import pooled
from opgraft.models.through_transformers import GRAFT_INSTEAD
from opgraft.ops.attention.batch import AttentionBatch, attending
from opgraft.plugins.agreement import process_rows
from opgraft.plugins.guarding import LatePatches
from opgraft.plugins.selection import current_platform
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

DEVICE_SHARE = 0.9
"""The cache's share of the free memory of a device, which mostly works for one process."""

HOST_SHARE = 0.25
"""The cache's share of the free memory of a host, which other programs need, too."""

_SMALL = 0.5
"""A share of the memory for step and cache. A largest step with a smaller bound is not tried."""


@PluggableClass.register("worker")
class Worker(PluggableClass):
    """Prepares a device, loads the model there, and computes steps.

    Args:
        opgraft_config: all settings. Missing settings have the built-in default.
        local_rank: the number of the worker on this host. It chooses one of several devices.
        local_size: the number of workers on this host.
    """

    def __init__(
        self, opgraft_config: OpgraftConfig, local_rank: int = 0, local_size: int = 1
    ) -> None:
        self.opgraft_config = opgraft_config.resolved()
        self.local_rank = local_rank
        self.local_size = local_size
        self.store: StoredBlocks | None = None
        self._checkpoint: object = None
        self._tried: set[str] = set()
        self._paged = False
        self._threads = 0
        self._patches = LatePatches()

    @classmethod
    def expect_split(cls, parallel: ParallelConfig) -> None:
        """Refuse a split of the model that the devices cannot compute.

        The engine calls this before any process starts.

        Raises:
            ConfigError: the settings have several devices for a process. Only a subclass can do so.
        """
        count = parallel.devices_per_rank
        if count > 1:
            raise ConfigError(
                f"parallel.devices_per_rank is {count}, and on the platform "
                f"{current_platform().name} a process computes on one device: set parallel.tensor "
                "to share each layer among processes"
            )

    @classmethod
    def host_number(cls) -> int:
        """Return the number of this host among the hosts of the devices, 0 by default.

        The ranks of a host with a smaller number come first.
        """
        return 0

    @classmethod
    def enter_job(cls, places: RankPlaces) -> None:
        """Prepare the process to join other ranks, before any code uses a device.

        Args:
            places: the hosts and devices of all ranks. There are several ranks.

        Raises:
            PlatformError: the devices of these places cannot compute together.
        """

    def claim_devices(self) -> None:
        """Prepare the process for its devices, before any code uses a device."""

    def init_device(self) -> None:
        """Choose the device, and seed its random numbers.

        Raises:
            ConfigError: there is no device for this worker, torch does not know the device of the
                settings, or the settings have one device for several ranks.
        """
        self.claim_devices()
        load = self.opgraft_config.load
        self.device = device_named(load.device or self._own_device())
        has_number = self.device.index is not None
        if has_number and self.local_size > 1 and load.device:
            raise ConfigError(
                f"load.device is {load.device!r:.80}, one device for {self.local_size} ranks of "
                "this host: leave its number out, so that each rank has its own"
            )
        self.memory = MemoryQuery(self.device)
        current_platform().manual_seed(self.opgraft_config.model.seed)
        if has_number:
            # The model is loaded on this rank's device.
            own = replace(load, device=str(self.device))
            self.opgraft_config = replace(self.opgraft_config, load=own)
        self.runner = ModelRunner(self.opgraft_config, self.device)

    def _own_device(self) -> str:
        platform = current_platform()
        devices = platform.device_count()
        if devices < 2:
            return platform.device_type
        if self.local_rank >= devices:
            raise ConfigError(
                f"this host has {self.local_size} ranks and {devices} devices of {platform.name}: "
                "lower parallel.tensor or parallel.pipeline"
            )
        return f"{platform.device_type}:{self.local_rank}"

    def synchronize(self) -> None:
        """Wait until the device has finished its work."""
        current_platform().synchronize(self.device.index or 0)

    def load_model(self) -> CacheSizes:
        """Load the model, and return the sizes of the cache that its layers need."""
        if self.opgraft_config.cache.store is not None:
            self._checkpoint = state_of_checkpoint(str(self.opgraft_config.model.name))
        self.runner.load_model()
        self._patches.look("while a model was loaded")
        return self.runner.layout.sizes()

    def load_encoder(self) -> None:
        """Load the model for ``embed`` and prepare it: see ``ModelRunner.prepare_encoder``.

        Raises:
            ConfigError: the model cannot be compiled.
        """
        self.runner.load_model()
        self.runner.prepare_encoder()
        self._patches.look("while a model was loaded")

    def group_cache(self, windows: Sequence[int | None]) -> CacheSizes:
        """Group the layers by the windows of all stages of a pipeline, and return the sizes."""
        self.runner.layout = self.runner.layout.grouped(windows)
        return self.runner.layout.sizes()

    def max_context(self) -> int | None:
        """Return the tokens of the longest context; ``None`` if there is no limit."""
        longest = int(self.runner.model.max_position)
        return None if longest == sys.maxsize else longest

    def trained_context(self) -> int | None:
        """Return the longest context of the training in tokens; ``None`` if the config has none."""
        config = self.runner.model.config
        return None if config is None else trained_context(config.get_text_config())

    def vocab_size(self) -> int:
        """Return the number of tokens of the vocabulary; ``sys.maxsize`` if it is not known."""
        return self.runner.vocab_size or sys.maxsize

    def why_uncached(self) -> str:
        """Return the reason why a model of transformers has no cache; empty if it has one."""
        model = self.runner.model
        if not isinstance(model, TransformersModel) or not model.uncached:
            return ""
        return f"{model.uncached}. {GRAFT_INSTEAD}"

    def context_fits(self) -> tuple[ContextFit, ...]:
        """Return the ropes of the model that depend on the length of the context."""
        return tuple(
            ContextFit(rope.trained_positions, rope.gradual)
            for rope in self.runner.model.fitted_ropes
        )

    def cache_bytes(self) -> int:
        """Return the bytes for the cache: those of the settings, else a share of the free memory.

        On a device other than the host, the peak of the largest step is subtracted. On the host,
        the share is small enough to leave room for every step. Blocks for padding of recorded steps
        are subtracted, too.

        Raises:
            ConfigError: the platform does not know the memory of the device, or the largest step
                fails on the device.
        """
        room = self._bytes_of_cache()
        padding = blocks_of_padding(self.opgraft_config)
        if padding:
            room -= padding * self.runner.layout.bytes_per_block
        return max(0, room)

    def _bytes_of_cache(self) -> int:
        cache = self.opgraft_config.cache
        if cache.memory_bytes is not None:
            return cache.memory_bytes
        free = self._free_memory()
        if self.memory.is_of_host:
            return int(free * (cache.memory_share or HOST_SHARE)) // self.local_size
        budget = int(free * (cache.memory_share or DEVICE_SHARE)) // self._sharing()
        return max(0, budget - self._peak(budget))

    def _sharing(self) -> int:
        """Return the number of workers on this host that share the memory of the device."""
        if self.memory.is_of_host or current_platform().device_count() < 2:
            return self.local_size
        return 1

    def _free_memory(self) -> int:
        """Return the free bytes of the device, which may belong to another platform.

        Raises:
            ConfigError: the platform does not know the memory of the device.
        """
        free = self._free_or_unknown()
        if free is None:
            platform = current_platform()
            raise ConfigError(
                f"the free memory of load.device={self.device} is not known, as the platform "
                f"{platform.name} is for {platform.device_type}: set cache.memory_bytes or "
                "cache.num_blocks"
            )
        return free

    def _free_or_unknown(self) -> int | None:
        free = self.memory.free()
        if free is None or not self.memory.is_of_host:
            return free
        # Weights in mapped files move to memory later.
        return max(0, free - self.runner.bytes_in_files)

    def expect_memory(self, num_blocks: int, num_states: int) -> None:
        """Refuse a cache that is larger than the free memory.

        On a host, the system would kill the process later, when the cache is filled.

        Raises:
            ConfigError: the cache is too large.
        """
        layout = self.runner.layout
        free = self._free_or_unknown()
        blocks = num_blocks + blocks_of_padding(self.opgraft_config)
        needed = blocks * layout.bytes_per_block + num_states * layout.bytes_per_state
        sharing = self._sharing()
        if free is not None and needed * sharing > free:
            ranks = f" on each of {sharing} ranks" if sharing > 1 else ""
            raise ConfigError(
                f"the cache of {blocks:,} blocks and {num_states:,} states takes {needed:,} "
                f"bytes{ranks}, and {free:,} are free on {self.device}: lower cache.num_blocks, "
                "cache.memory_bytes or cache.num_states, or leave them out, so that it takes the "
                "share cache.memory_share of what is free"
            )

    def _peak(self, budget: int) -> int:
        """Return the bytes of the largest step at its peak, or a bound if the bound is small.

        Raises:
            ConfigError: the step fails.
        """
        bound = self.runner.bound_of_largest_step()
        if bound is not None and bound < budget * _SMALL:
            size = f"{bound / 2**20:,.1f}"
            logger.info("the largest step takes less than %s MiB on %s", size, self.device)
            return bound
        try:
            peak = self._tried_peak()
            current_platform().synchronize(self.device.index or 0)
        # torch raises RuntimeError if it runs out of memory.
        except RuntimeError as error:
            limits = self.opgraft_config.scheduler
            raise ConfigError(
                f"the largest step, of {limits.max_num_batched_tokens} tokens and "
                f"{limits.max_num_seqs} sequences, fails on {self.device}: {described(error)}. "
                "Lower scheduler.max_num_batched_tokens or scheduler.max_num_seqs, or set "
                "cache.memory_bytes to leave it out"
            ) from error
        logger.info("the largest step takes %s MiB on %s", f"{peak / 2**20:,.1f}", self.device)
        return peak

    def _tried_peak(self) -> int:
        """Compute the largest step and return its bytes. A slow device may take a minute."""
        limits = self.opgraft_config.scheduler
        words = (
            f"trial step of {limits.max_num_batched_tokens:,} tokens on {self.device}, for the "
            "size of the cache"
        )
        logger.info("%s", words)
        # None shows the bar on a terminal only.
        shown = None if self.opgraft_config.load.progress and self.local_rank == 0 else False
        with progress_bar(words, self.runner.calls_of_largest_step(), shown) as called:
            return self.runner.peak_of_largest_step(self._free_memory, lambda: called(1))

    def allocate_cache(self, num_blocks: int, num_states: int = 0) -> None:
        """Make the cache, and compile the model if ``compilation_config`` asks for that.

        Raises:
            ConfigError: the model cannot be compiled.
        """
        self.runner.allocate_cache(num_blocks, num_states)
        self.runner.compile_model()
        # Compiling calls kernels, and so does the trial step before.
        self._patches.look("before the first step")
        self._paged = True

    def open_store(self) -> None:
        """Open ``cache.store`` for the blocks of this rank.

        Raises:
            ConfigError: the folder or its key cannot be used, the model's cache cannot be stored,
                or the files of the checkpoint have changed since it was loaded.
        """
        if not self.opgraft_config.cache.prefix_reuse:
            raise ConfigError(
                "cache.store is set, and cache.prefix_reuse is off, so that nobody would look for "
                "stored blocks: leave one of them out"
            )
        setting = self.opgraft_config.handover.store_setting
        groups = self.runner.cache_groups()
        origin = self._origin_of_blocks()
        if self._checkpoint is None:
            raise ConfigError(
                f"{setting} is set, and {type(self).__name__} loads models without noting the "
                "files: leave it out, or call load_model of opgraft.engine.workers.worker:Worker"
            )
        if state_of_checkpoint(str(self.opgraft_config.model.name)) != self._checkpoint:
            raise ConfigError(
                f"{setting} is set, and the files of {self.opgraft_config.model.name} have "
                "changed while the model was loaded, so that blocks have no name: start again"
            )
        self.store = StoredBlocks(
            self.opgraft_config.cache, origin, groups, self.opgraft_config.handover.part
        )
        # Behind the name of the blocks, which has the number of threads.
        self.share_host(self.opgraft_config.handover.part == "computes")

    def share_host(self, shared: bool) -> None:
        """Compute with half of the threads while another process uses the others."""
        if self.memory.is_of_host:
            self._threads = self._threads or torch.get_num_threads()
            torch.set_num_threads(max(1, self._threads // 2) if shared else self._threads)

    def _origin_of_blocks(self) -> dict[str, Any]:
        """Return everything that the numbers in this rank's blocks depend on, beside tokens."""
        config = self.opgraft_config
        model = self.runner.model
        explained = self.explain()
        kernels = {(row.op_class, row.kernel, str(row.provider)) for row in explained.rows}
        classes = {(row.name, row.cls, str(row.provider)) for row in explained.classes}
        layout = self.runner.layout
        ranks = get_tp_group()
        return {
            **origin_of_numbers(model, config.compilation_config),
            # Replicas share blocks. The names of layers tell stages of a pipeline apart.
            "ranks": [ranks.rank_in_group, ranks.world_size],
            "process": process_rows(),
            "checkpoint": digest_of_checkpoint(str(config.model.name)),
            "dtypes": [str(model.dtype), str(layout.dtype)],
            "longest context": config.model.max_model_len,
            "implementation": [config.model.implementation, config.model.part],
            "invariant": config.model.batch_invariant,
            "quantization": repr(config.quantization),
            "layers": [list(map(str, group)) for group in layout.groups],
            "kernels": sorted(kernels),
            "classes": sorted(classes),
        }

    def save_blocks(
        self, blocks: Sequence[tuple[bytes, Sequence[int]]], used: Sequence[bytes]
    ) -> None:
        """Write full blocks to the store in the background, and note the use of others."""
        if self.store is not None:
            self.store.save(blocks, used)

    def finish_saving(self, seconds: float) -> None:
        """Wait until all blocks are written to the store, at most for the given time."""
        if self.store is not None:
            self.store.finish(seconds)

    def stored_blocks(self, digests: Sequence[bytes]) -> int:
        """Return about how many of the hashes have a stored block, up to the first without."""
        return 0 if self.store is None else self.store.count(digests)

    def load_blocks(self, wanted: Sequence[tuple[bytes, Sequence[int | None]]]) -> int:
        """Fill blocks from the store, up to the first failure; return their number."""
        return 0 if self.store is None else self.store.load(wanted)

    def embed(
        self, sequences: Sequence[Sequence[int]], pooling: Sequence[str], normalize: bool
    ) -> list[list[float]]:
        """Return a vector for each sequence, computed at once and without a cache.

        Args:
            sequences: the token ids of each sequence.
            pooling: names in ``opgraft.models.pooling.POOLINGS``.
            normalize: make the vectors of unit length.
        """
        states = self._encode(sequences)
        ones = [torch.ones(len(rows), device=rows.device) for rows in states]
        mask = pad_sequence(ones, batch_first=True)
        vectors = pooled(pad_sequence(states, batch_first=True), mask, pooling)
        if normalize:
            vectors = functional.normalize(vectors, dim=-1)
        return vectors.tolist()

    def _encode(self, *arguments: Sequence[Any]) -> Any:
        try:
            return self.runner.encode(*arguments)
        finally:
            self._patches.look_after_call()

    def labels(self) -> Sequence[str]:
        """Return the names of the labels that the model tells apart; empty without any."""
        model = self.runner.model
        return model.labels if isinstance(model, HasLabels) else ()

    def classify(
        self, sequences: Sequence[Sequence[int]], seconds: Sequence[int]
    ) -> list[list[float]]:
        """Return the probabilities of the labels for each sequence.

        Args:
            sequences: the token ids of each sequence.
            seconds: the place of the second text in each pair; of a single text, the length.
        """
        states = self._encode(sequences, seconds)
        model: Any = self.runner.model
        with torch.inference_mode():
            first = torch.stack([rows[0] for rows in states])
            probabilities: list[list[float]] = model.probabilities(first).tolist()
        return probabilities

    def wrong_kernel(self, sequences: Sequence[Sequence[int]]) -> str:
        """Encode sequences once more, and return the result of ``culprit_of``."""
        return self.runner.wrong_kernel(sequences)

    def replaced_class(self) -> str:
        """Name a plugin's class that replaces a whole part of the engine; empty without one."""
        return replaced_among([self]) or self.runner.replaced_class()

    def explain(self) -> Explanation:
        """Return the used classes, and the kernel of each op of the model in the engine's calls."""
        batch = AttentionBatch.of_sequences([], block_size=self.runner.layout.block_size)
        with attending(batch) if self._paged else nullcontext():
            explained = explain(self.runner.model)
        if self.runner.adapters is not None:
            ops = self.runner.adapters.ops
            explained = explained.with_ops({f"{path}.adapters": op for path, op in ops.items()})
        communicator = get_tp_group().communicator
        others: dict[str, object] = {} if communicator is None else {"communicator": communicator}
        # An encoder has no cache, and samples no tokens.
        if self._paged:
            others |= {"memory_query": self.memory, "sampler": self.runner.sampler}
        if self.runner.compiled is not None:
            others["attention_nodes"] = self.runner.compiled.nodes
        return explained.within(
            worker=self,
            model_runner=self.runner,
            **others,
        )

    def add_lora(self, request: LoRARequest) -> LoRAReport:
        """Read an adapter for requests that name it."""
        adapters = self.runner.adapters
        if adapters is None:
            return LoRAReport("lora.enabled is not set")
        report = adapters.add(request)
        # Requests wait for a trial. An adapter that is read again needs no other one.
        if report.error or report.elsewhere or report.digest in self._tried:
            return report
        error = self.runner.try_adapter(request.lora_int_id)
        if error:
            return LoRAReport(error)
        self._tried.add(report.digest)
        return report

    def remove_lora(self, number: int) -> None:
        """Forget an adapter."""
        if self.runner.adapters is not None:
            self.runner.adapters.remove(number)

    def execute(self, step: Step) -> StepResult:
        """Compute a step."""
        try:
            return self.runner.execute(step)
        finally:
            self._patches.look_after_call()
