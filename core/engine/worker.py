"""``Worker``: one device with its model runner."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from opgraft.binding.explaining import Explanation, explain
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.config import OpgraftConfig
from opgraft.engine.cache_layout import CacheLayout
from opgraft.engine.model_runner import ModelRunner
from opgraft.engine.step import Step, StepResult
from opgraft.plugins.selection import current_platform
from opgraft.pooling import pooled
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

DEVICE_SHARE, HOST_SHARE = 0.9, 0.25
"""Of the free memory, for the cache: a device works for one process as a rule, the memory of a host is everybody's."""


@PluggableClass.register("worker")
class Worker(PluggableClass):
    """Prepares a device, loads the model there, and computes steps.

    Args:
        opgraft_config: resolved.
        local_rank: index of the device.
    """

    def __init__(self, opgraft_config: OpgraftConfig, local_rank: int = 0) -> None:
        self.opgraft_config = opgraft_config
        self.local_rank = local_rank

    def init_device(self) -> None:
        """Choose the device, and seed its random numbers."""
        platform = current_platform()
        index = f":{self.local_rank}" if platform.device_count() > 1 else ""
        self.device = torch.device(self.opgraft_config.load.device or f"{platform.device_type}{index}")
        platform.manual_seed(self.opgraft_config.model.seed)
        self.runner = ModelRunner(self.opgraft_config, self.device)

    def load_model(self) -> CacheLayout:
        """Load the model; its attention layers say which cache they need."""
        self.runner.load_model()
        return self.runner.layout

    def max_context(self) -> int | None:
        """Return the tokens of the longest context; ``None`` where neither settings nor checkpoint say."""
        longest = int(self.runner.model.max_position)
        return None if longest == sys.maxsize else longest

    def cache_bytes(self) -> int:
        """Return the bytes that the cache may take: as set, or a share of the memory that is free now."""
        cache = self.opgraft_config.cache
        if cache.memory_bytes is not None:
            return cache.memory_bytes
        platform = current_platform()
        share = cache.memory_share or (HOST_SHARE if "cpu" in platform.dispatch_chain else DEVICE_SHARE)
        return int(platform.memory(self.local_rank).free * share)

    def allocate_cache(self, num_blocks: int) -> None:
        """Make the cache of that many blocks."""
        self.runner.allocate_cache(num_blocks)

    def embed(self, sequences: Sequence[Sequence[int]], pooling: Sequence[str], normalize: bool) -> list[list[float]]:
        """Return a vector for each of some sequences, computed whole and without a cache.

        Args:
            sequences: token ids of each.
            pooling: names of ``opgraft.pooling.POOLINGS``.
            normalize: make the vectors of unit length.
        """
        states = self.runner.encode(sequences)
        mask = pad_sequence([torch.ones(len(rows), device=rows.device) for rows in states], batch_first=True)
        vectors = pooled(pad_sequence(states, batch_first=True), mask, pooling)
        return (functional.normalize(vectors, dim=-1) if normalize else vectors).tolist()

    def explain(self) -> Explanation:
        """Tell which kernel each op of the model is bound to."""
        return explain(self.runner.model)

    def execute(self, step: Step) -> StepResult:
        """Compute a step."""
        return self.runner.execute(step)
