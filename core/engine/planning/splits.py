"""Find the splits of a model over devices that fit, with memory, bytes sent and the best speed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from opgraft.base.text import printable
from opgraft.config import OpgraftConfig
from opgraft.distributed.layout import ParallelLayout
from opgraft.engine.planning.estimate import Seconds, seconds_of, sent_bytes
from opgraft.engine.planning.shard import Shard
from opgraft.engine.planning.units import in_bytes
from opgraft.engine.runner.cache_room import room_for
from opgraft.engine.workers.worker import DEVICE_SHARE
from opgraft.errors import (
    CheckpointError,
    ConfigError,
    DistributedError,
    InputError,
    LayerError,
    OpgraftError,
)
from opgraft.machine.device_figures import DeviceFigures
from opgraft.models.files import open_weights, opened_once
from opgraft.models.stages import evenly


@dataclass(frozen=True)
class PlanRequest:
    """The devices and the sequences of a plan.

    Attributes:
        devices: the number of devices.
        batch: the number of sequences that generate at once, on all replicas.
        context: tokens of each sequence.
        fixed: sizes of ``parallel`` by name that every split must have.
    """

    devices: int
    batch: int
    context: int
    fixed: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Split:
    """A way to share a model between ranks.

    Attributes:
        layout: the layout of the ranks.
        expert: the number of ranks with different experts; 1 if each rank has a part of every
            expert.
    """

    layout: ParallelLayout
    expert: int = 1

    @property
    def name(self) -> str:
        """The settings of the split, such as ``tensor 8, pipeline 2``."""
        sizes = {**dataclasses.asdict(self.layout), "expert": self.expert}
        parts = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        return ", ".join(parts) or "one device"


@dataclass(frozen=True)
class Fitting(Split):
    """A split that fits.

    Attributes:
        weight_bytes: bytes of the weights of the fullest rank.
        cache_tokens: tokens in the cache of one replica.
        sent: kind of group → bytes that the busiest rank sends or receives in a step.
        stages: the time of each pipeline stage.
        step: seconds between two tokens of a sequence.
        tokens_per_second: tokens of all sequences in a second.
        batch: the number of sequences of one call of a stage.
    """

    weight_bytes: int = 0
    cache_tokens: int = 0
    sent: Mapping[str, float] = dataclasses.field(default_factory=dict)
    stages: tuple[Seconds, ...] = ()
    step: float = 0.0
    tokens_per_second: float = 0.0
    batch: int = 0


@dataclass(frozen=True)
class RefusedSplit(Split):
    """A split that is not possible, with the reason."""

    reason: str = ""


class Planner:
    """Tries splits of one model on one kind of device.

    Args:
        config: resolved, with the name of the model.
        device: figures of each device.
    """

    def __init__(self, config: OpgraftConfig, device: DeviceFigures) -> None:
        self.config = config
        self.device = device
        self._shards: dict[Any, Shard] = {}
        self._stage_layers: dict[int, Sequence[int]] = {}
        with opened_once(config_only=True):
            self._config_only = not open_weights(config.model.name or "").tensors

    def plan(self, wanted: PlanRequest) -> tuple[list[Fitting], list[RefusedSplit]]:
        """Return the splits that fit, the fastest first, and the other splits.

        Raises:
            InputError: fixed sizes do not divide the devices.
            OpgraftError: the model cannot be constructed on one rank.
        """
        whole = self._whole()
        fitting: list[Fitting] = []
        refused: list[RefusedSplit] = []
        for split in self._splits(wanted, whole):
            reason = self._obstacle(split, wanted, whole)
            if reason:
                refused.append(RefusedSplit(split.layout, split.expert, reason))
            else:
                fitting.append(self._fitting(split, wanted))
        if not fitting and not refused:
            sizes = ", ".join(f"{name} {size}" for name, size in wanted.fixed.items())
            raise InputError(
                f"{wanted.devices} devices cannot be split with {sizes}: fix sizes whose product "
                "divides the number of devices, or leave one open"
            )
        fitting.sort(key=lambda each: (-each.tokens_per_second, each.step))
        return fitting, refused

    def least_devices(self, wanted: PlanRequest) -> int | None:
        """Return the least number of devices with a split that fits.

        The number is greater than ``wanted.devices``. Fixed sizes do not count.

        Returns:
            The number; ``None`` if there is none below four times the necessary memory.
        """
        whole = self._whole()
        cache = whole.cache
        bytes_of_blocks = cache.blocks(wanted.context) * cache.bytes_per_block
        bytes_of_sequence = bytes_of_blocks + cache.bytes_per_state
        total = whole.weight_bytes + wanted.batch * bytes_of_sequence
        first = max(wanted.devices + 1, ceil(total / self.device.memory))
        for number in range(first, 4 * first):
            # Beyond 32, whole hosts of eight devices.
            if number > 32 and number % 8:
                continue
            tried = dataclasses.replace(wanted, fixed={}, devices=number)
            for split in self._splits(tried, whole):
                if not self._obstacle(split, tried, whole):
                    return number
        return None

    def _whole(self) -> Shard:
        """Return the model on one rank."""
        return self._shard(Split(ParallelLayout()), 0)

    def _splits(self, wanted: PlanRequest, whole: Shard) -> Iterator[Split]:
        """Yield the splits with the number of devices and the fixed sizes."""
        fixed = wanted.fixed
        for data in _divisors(wanted.devices):
            for pipeline in _divisors(wanted.devices // data):
                tensor = wanted.devices // data // pipeline
                layout = ParallelLayout(tensor, pipeline, data)
                sizes = dataclasses.asdict(layout)
                if any(sizes[name] != size for name, size in fixed.items() if name in sizes):
                    continue
                # Experts are shared by all ranks of a stage, or each rank has a part of each.
                experts = {1, data * tensor} if whole.experts else {1}
                for expert in sorted(experts):
                    if fixed.get("expert", expert) == expert:
                        yield Split(layout, expert)

    def _obstacle(self, split: Split, wanted: PlanRequest, whole: Shard) -> str:
        """Return the reason why a split is not possible; empty if the split fits.

        Raises:
            CheckpointError: the checkpoint is damaged.
        """
        layout = split.layout
        # Without expert parallelism, each replica has all weights.
        devices = layout.world if split.expert > 1 else layout.tensor * layout.pipeline
        memory = devices * self.device.memory
        # This spares the construction of a model that cannot fit.
        if whole.weight_bytes > memory:
            weights = in_bytes(whole.weight_bytes)
            if devices == 1:
                return f"the weights take {weights}, and a device has less"
            return f"the weights take {weights}, and {devices} devices have {in_bytes(memory)}"
        sequences = ceil(wanted.batch / layout.data)
        try:
            for rank in self._ranks(layout):
                self._cache_tokens(self._shard(split, rank), wanted, sequences)
        except CheckpointError:
            raise
        except OpgraftError as error:
            return str(error)
        return ""

    def _ranks(self, layout: ParallelLayout) -> list[int]:
        """Return the first rank of each stage of the first replica.

        If ranks of a stage have different shares, the first rank has the largest.
        """
        return [stage * layout.tensor for stage in range(layout.pipeline)]

    def _fitting(self, split: Split, wanted: PlanRequest) -> Fitting:
        """Return the figures of a split that fits."""
        layout = split.layout
        # Stages compute different requests at the same time.
        rows = ceil(wanted.batch / (layout.data * layout.pipeline))
        sequences = ceil(wanted.batch / layout.data)
        weights = []
        stages = []
        tokens = []
        sent = []
        for rank in self._ranks(layout):
            shard = self._shard(split, rank)
            step = shard.step(rows, wanted.context)
            weights.append(shard.weight_bytes)
            stages.append(seconds_of(shard, step, layout, rank, self.device))
            tokens.append(self._cache_tokens(shard, wanted, sequences))
            sent.append(sent_bytes(step.transfers, layout))
        # The slowest stage limits a full pipeline.
        seconds = layout.pipeline * max(stage.total for stage in stages)
        return Fitting(
            layout,
            split.expert,
            weight_bytes=max(weights),
            cache_tokens=min(tokens),
            sent=max(sent, key=lambda each: sum(each.values())),
            stages=tuple(stages),
            step=seconds,
            tokens_per_second=wanted.batch / seconds,
            batch=rows,
        )

    def _shard(self, split: Split, rank: int) -> Shard:
        """Return the shard of a rank. Replicas without expert parallelism share a shard."""
        layout = split.layout
        if split.expert == 1:
            layout = dataclasses.replace(layout, data=1)
        key = (layout, split.expert, rank)
        if key not in self._shards:
            sizes = {**dataclasses.asdict(layout), "expert": split.expert}
            stages = self._stages(layout.pipeline)
            parallel = dataclasses.replace(self.config.parallel, **sizes, **stages)
            config = dataclasses.replace(self.config, parallel=parallel)
            self._shards[key] = Shard(config, layout, rank)
        return self._shards[key]

    def _stages(self, count: int) -> dict[str, Any]:
        """Return ``stage_layers`` for a checkpoint without weights; nothing for other checkpoints.

        ``Stage.of`` would count the bytes of layers in the checkpoint. The described model has as
        many bytes.
        """
        if count == 1 or self.config.parallel.stage_layers or not self._config_only:
            return {}
        if count not in self._stage_layers:
            layers = self._whole().layer_bytes()
            self._stage_layers[count] = evenly(layers, count) if len(layers) >= count else ()
        return {"stage_layers": self._stage_layers[count]}

    def _cache_tokens(self, shard: Shard, wanted: PlanRequest, sequences: int) -> int:
        """Return the number of tokens in the cache of a rank.

        Raises:
            ConfigError: the weights are too large, or the cache is too small for the sequences.
        """
        left = self.device.memory - shard.weight_bytes
        memory = in_bytes(self.device.memory)
        if left <= 0:
            raise ConfigError(
                f"the weights of a rank take {in_bytes(shard.weight_bytes)} of {memory}"
            )
        cache = self.config.cache
        free = cache.memory_bytes or int(left * (cache.memory_share or DEVICE_SHARE))
        room = room_for(shard.cache.sizes(), self.config, lambda: free)
        held = room.num_states
        if shard.cache.layers:
            held = room.num_blocks // shard.cache.blocks(wanted.context)
        if held < sequences:
            raise ConfigError(
                f"the weights of a rank take {in_bytes(shard.weight_bytes)} of {memory}, and the "
                f"cache in the rest has room for {held} sequences of {wanted.context} tokens, and "
                f"not for {sequences}"
            )
        return shard.cache.tokens(room.num_blocks)


def expect_split(config: OpgraftConfig) -> None:
    """Refuse a section ``parallel`` that the model cannot be shared by, before a worker starts.

    The loading of the model finds other faults. No engine may compute in this process meanwhile.

    Args:
        config: resolved, with the name of the model.

    Raises:
        ConfigError: the model cannot be shared in this way.
    """
    parallel = config.parallel
    # Replicas without expert parallelism have equal shards.
    if parallel.expert == 1:
        parallel = dataclasses.replace(parallel, data=1)
    layout = ParallelLayout(parallel.tensor, parallel.pipeline, parallel.data)
    if layout.world == 1:
        return
    try:
        Shard(dataclasses.replace(config, parallel=parallel), layout, 0)
    except (LayerError, DistributedError) as error:
        name = printable(config.model.name or "")
        raise ConfigError(
            f"parallel: {name} cannot be shared by {Split(layout, parallel.expert).name}: {error}. "
            f"'opgraft plan {name} --devices {layout.world}', with the figures of a device, shows "
            "what can be"
        ) from error
    except OpgraftError:
        return


def _divisors(number: int) -> Iterator[int]:
    return (size for size in range(1, number + 1) if number % size == 0)
