"""The splits of a model over devices: which fit, what each rank holds and sends, and how fast they are at best."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from opgraft.base.text import printable
from opgraft.config import OpgraftConfig
from opgraft.distributed.layout import ParallelLayout
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
from opgraft.planning.estimate import Seconds, seconds_of, sent_bytes
from opgraft.planning.shard import Shard
from opgraft.planning.units import in_bytes


@dataclass(frozen=True)
class PlanRequest:
    """Devices and sequences that a plan is for.

    Attributes:
        devices: how many there are.
        batch: sequences that generate at once, of all replicas.
        context: tokens of each.
        fixed: sizes of ``parallel`` that every split has, by their names.
    """

    devices: int
    batch: int
    context: int
    fixed: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Split:
    """A way to share a model, and what became of it.

    Attributes:
        layout: of the ranks.
        expert: ranks that have different experts; 1 where each has a part of all.
    """

    layout: ParallelLayout
    expert: int = 1

    @property
    def name(self) -> str:
        """The settings that make it, such as ``tensor 8, pipeline 2``."""
        sizes = {**dataclasses.asdict(self.layout), "expert": self.expert}
        return (
            ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one device"
        )


@dataclass(frozen=True)
class Fitting(Split):
    """A split that fits.

    Attributes:
        weight_bytes: of the rank that has most.
        cache_tokens: that the cache of one replica holds.
        sent: bytes that the busiest rank sends or receives in a step, by the kind of group.
        stages: the time of each pipeline stage.
        step: seconds from one token of a sequence to its next.
        tokens_per_second: of all sequences.
        batch: sequences of one call of a stage.
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
    """A split that cannot be, and why."""

    reason: str = ""


class Planner:
    """Tries splits of one model on one kind of device.

    Args:
        config: resolved; it names the model.
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
        """Return the splits that fit, the fastest first, and the others.

        Raises:
            InputError: fixed sizes do not divide the devices.
            OpgraftError: the model cannot be made, however it is split.
        """
        whole = self._shard(Split(ParallelLayout()), 0)
        tried = [self._tried(split, wanted, whole) for split in self._splits(wanted, whole)]
        if not tried:
            sizes = ", ".join(f"{name} {size}" for name, size in wanted.fixed.items())
            raise InputError(
                f"{wanted.devices} devices cannot be split with {sizes}: fix sizes whose product divides the number of "
                "devices, or leave one open"
            )
        fitting = [each for each in tried if isinstance(each, Fitting)]
        fitting.sort(key=lambda each: (-each.tokens_per_second, each.step))
        return fitting, [each for each in tried if isinstance(each, RefusedSplit)]

    def least_devices(self, wanted: PlanRequest) -> int | None:
        """Return the least number of devices, more than are wanted, on which a split fits; ``None`` if none does."""
        whole = self._shard(Split(ParallelLayout()), 0)
        cache = (
            whole.cache.blocks(wanted.context) * whole.cache.bytes_per_block
            + whole.cache.bytes_per_state
        )
        needed = ceil((whole.weight_bytes + wanted.batch * cache) / self.device.memory)
        first = max(wanted.devices + 1, needed)
        open_sizes = dataclasses.replace(wanted, fixed={})
        numbers = [number for number in range(first, 4 * first) if number <= 32 or not number % 8]
        return next((number for number in numbers if self._fits(open_sizes, number)), None)

    def _fits(self, wanted: PlanRequest, devices: int) -> bool:
        tried = dataclasses.replace(wanted, devices=devices)
        whole = self._shard(Split(ParallelLayout()), 0)
        return any(not self._obstacle(each, tried, whole) for each in self._splits(tried, whole))

    def _splits(self, wanted: PlanRequest, whole: Shard) -> Iterator[Split]:
        """Yield the products of sizes that make the number of devices, with the fixed ones."""
        fixed = wanted.fixed
        for data in _divisors(wanted.devices):
            for pipeline in _divisors(wanted.devices // data):
                layout = ParallelLayout(wanted.devices // data // pipeline, pipeline, data)
                sizes = dataclasses.asdict(layout)
                if any(sizes[name] != size for name, size in fixed.items() if name in sizes):
                    continue
                experts = sorted({1, data * layout.tensor} if whole.experts else {1})
                yield from (
                    Split(layout, each) for each in experts if fixed.get("expert", each) == each
                )

    def _tried(self, split: Split, wanted: PlanRequest, whole: Shard) -> Fitting | RefusedSplit:
        reason = self._obstacle(split, wanted, whole)
        return (
            RefusedSplit(split.layout, split.expert, reason)
            if reason
            else self._fitting(split, wanted)
        )

    def _obstacle(self, split: Split, wanted: PlanRequest, whole: Shard) -> str:
        """Return why a split cannot be; empty where it fits."""
        layout = split.layout
        held = layout.world if split.expert > 1 else layout.tensor * layout.pipeline
        if whole.weight_bytes > held * self.device.memory:
            there = (
                f"{held} devices have {in_bytes(held * self.device.memory)}"
                if held > 1
                else "a device has less"
            )
            return f"the weights take {in_bytes(whole.weight_bytes)}, and {there}"
        try:
            for rank in self._ranks(layout):
                self._cache_tokens(
                    self._shard(split, rank), wanted, ceil(wanted.batch / layout.data)
                )
        except CheckpointError:
            raise
        except OpgraftError as error:
            return str(error)
        return ""

    def _ranks(self, layout: ParallelLayout) -> list[int]:
        """Return a rank of each stage of the first replica: the first, which has most where others have less."""
        return [stage * layout.tensor for stage in range(layout.pipeline)]

    def _fitting(self, split: Split, wanted: PlanRequest) -> Fitting:
        layout, device = split.layout, self.device
        rows = ceil(wanted.batch / (layout.data * layout.pipeline))
        ranks = self._ranks(layout)
        shards = [self._shard(split, rank) for rank in ranks]
        tokens = [
            self._cache_tokens(shard, wanted, ceil(wanted.batch / layout.data)) for shard in shards
        ]
        steps = [shard.step(rows, wanted.context) for shard in shards]
        stages = tuple(
            seconds_of(shard, step, layout, rank, device)
            for shard, step, rank in zip(shards, steps, ranks, strict=True)
        )
        step = max(
            sum(each.total for each in stages), layout.pipeline * max(each.total for each in stages)
        )
        sent = [sent_bytes(each.transfers, layout) for each in steps]
        return Fitting(
            layout,
            split.expert,
            weight_bytes=max(shard.weight_bytes for shard in shards),
            cache_tokens=min(tokens),
            sent=max(sent, key=lambda each: sum(each.values())),
            stages=stages,
            step=step,
            tokens_per_second=wanted.batch / step,
            batch=rows,
        )

    def _shard(self, split: Split, rank: int) -> Shard:
        layout = split.layout if split.expert > 1 else dataclasses.replace(split.layout, data=1)
        key = layout, split.expert, rank
        if key not in self._shards:
            sizes = {**dataclasses.asdict(layout), "expert": split.expert}
            parallel = dataclasses.replace(
                self.config.parallel, **sizes, **self._stages(layout.pipeline)
            )
            config = dataclasses.replace(self.config, parallel=parallel)
            self._shards[key] = Shard(config, layout, rank)
        return self._shards[key]

    def _stages(self, count: int) -> dict[str, Any]:
        """Return the layers of each stage where only weights would tell which these are, and there are none."""
        if count == 1 or self.config.parallel.stage_layers or not self._config_only:
            return {}
        if count not in self._stage_layers:
            layers = self._shard(Split(ParallelLayout()), 0).layer_bytes()
            self._stage_layers[count] = evenly(layers, count) if len(layers) >= count else ()
        return {"stage_layers": self._stage_layers[count]}

    def _cache_tokens(self, shard: Shard, wanted: PlanRequest, sequences: int) -> int:
        """Return the tokens that the cache of a rank holds, of which as many sequences as are wanted have room.

        Raises:
            ConfigError: they have not, or the weights alone are too large.
        """
        left = self.device.memory - shard.weight_bytes
        memory = in_bytes(self.device.memory)
        if left <= 0:
            raise ConfigError(
                f"the weights of a rank take {in_bytes(shard.weight_bytes)} of {memory}"
            )
        cache = self.config.cache
        room = room_for(
            shard.cache.sizes(),
            self.config,
            lambda: cache.memory_bytes or int(left * (cache.memory_share or DEVICE_SHARE)),
        )
        held = (
            room.num_blocks // shard.cache.blocks(wanted.context)
            if shard.cache.layers
            else room.num_states
        )
        if held < sequences:
            raise ConfigError(
                f"the weights of a rank take {in_bytes(shard.weight_bytes)} of {memory}, and the cache in the rest has "
                f"room for {held} sequences of {wanted.context} tokens, and not for {sequences}"
            )
        return shard.cache.tokens(room.num_blocks)


def expect_split(config: OpgraftConfig) -> None:
    """Expect that a model can be shared as ``parallel`` says, which its config tells before a worker starts.

    What else is wrong with the model is left to its loading. No engine may compute in this process meanwhile.

    Args:
        config: resolved; it names the model.

    Raises:
        ConfigError: it cannot.
    """
    parallel = (
        config.parallel
        if config.parallel.expert > 1
        else dataclasses.replace(config.parallel, data=1)
    )
    layout = ParallelLayout(parallel.tensor, parallel.pipeline, parallel.data)
    if layout.world == 1:
        return
    try:
        Shard(dataclasses.replace(config, parallel=parallel), layout, 0)
    except (LayerError, DistributedError) as error:
        name = printable(config.model.name or "")
        raise ConfigError(
            f"parallel: {name} cannot be shared by {Split(layout, parallel.expert).name}: {error}. "
            f"'opgraft plan {name} --devices {layout.world}', with the figures of a device, shows what can be"
        ) from error
    except OpgraftError:
        return


def _divisors(number: int) -> Iterator[int]:
    return (size for size in range(1, number + 1) if number % size == 0)
