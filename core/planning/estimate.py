"""Estimates of the time that a step takes at best: reading, computing and sending, as fast as a device can."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log2
from types import MappingProxyType

from opgraft.distributed.layout import ParallelLayout
from opgraft.machine.device_figures import DeviceFigures
from opgraft.planning.imagined import Transfer
from opgraft.planning.shard import Shard, ShardStep, Work

_SENT: Mapping[str, Callable[[float, int], float]] = MappingProxyType(
    {
        "all_reduce": lambda nbytes, ranks: 2 * nbytes * (ranks - 1) / ranks,
        "all_gather": lambda nbytes, ranks: nbytes * (ranks - 1),
        "gather": lambda nbytes, ranks: nbytes * (ranks - 1),
        "reduce_scatter": lambda nbytes, ranks: nbytes * (ranks - 1) / ranks,
        "all_to_all": lambda nbytes, ranks: nbytes * (ranks - 1) / ranks,
        "broadcast": lambda nbytes, ranks: nbytes,
        "send": lambda nbytes, ranks: nbytes,
        "recv": lambda nbytes, ranks: nbytes,
    }
)
"""Collective → the bytes through the busiest rank's link, in the direction that has more, by the fewest there can be
(Thakur et al., 2005, doi:10.1177/1094342005051521)."""

_IN_PARTS = frozenset({"all_reduce", "reduce_scatter", "all_to_all"})
"""Collectives between hosts in which each device of a host has a part of the tensor."""


@dataclass(frozen=True)
class Seconds:
    """The time of a rank's part of a step, by what it goes to."""

    weights: float
    cache: float
    collectives: float
    layers: float

    @property
    def total(self) -> float:
        """The sum: one is waited for after the other."""
        return self.weights + self.cache + self.collectives + self.layers


def sent_bytes(transfers: Iterable[Transfer], layout: ParallelLayout) -> dict[str, float]:
    """Sum the bytes that a rank sends or receives, whichever is more, by the kind of group."""
    sums: dict[str, float] = {}
    for (kind, operation, nbytes), times in Counter(transfers).items():
        ranks = len(layout.groups(kind)[0])
        sums[kind] = sums.get(kind, 0.0) + times * _SENT[operation](nbytes, ranks)
    return sums


def seconds_of(
    shard: Shard, step: ShardStep, layout: ParallelLayout, rank: int, device: DeviceFigures
) -> Seconds:
    """Estimate the time of a rank's part of a step.

    Args:
        shard: of the rank.
        step: its part.
        layout: of all ranks.
        rank: of the job; neighbours fill one host after the other.
        device: on which each rank runs.
    """
    flops = device.flops.get(str(shard.dtype).removeprefix("torch."), device.flops.get(""))
    kinds = {kind for kind, _, _ in step.transfers}
    groups = {kind: next(each for each in layout.groups(kind) if rank in each) for kind in kinds}
    collectives = Counter(step.transfers)
    return Seconds(
        weights=_roof(step.weights, device.bandwidth, flops),
        cache=_roof(step.cache, device.bandwidth, flops),
        collectives=sum(
            times * _seconds(each, groups[each.kind], device) for each, times in collectives.items()
        ),
        layers=shard.layers * device.layer_seconds,
    )


def _roof(work: Work, bandwidth: float, flops: float | None) -> float:
    """Return the time of what limits some work (Williams et al., 2009, doi:10.1145/1498765.1498785)."""
    return max(work.nbytes / bandwidth, work.flops / flops if flops else 0.0)


def _seconds(transfer: Transfer, ranks: Sequence[int], device: DeviceFigures) -> float:
    """Return the time of a collective: within each host, and between them."""
    hosts = len({rank // device.linked for rank in ranks})
    within = ceil(len(ranks) / hosts)
    network = device.network or device.link
    nbytes = transfer.nbytes / within if transfer.operation in _IN_PARTS else transfer.nbytes
    return _flat(transfer.operation, transfer.nbytes, within, device.link, device.latency) + _flat(
        transfer.operation, nbytes, hosts, network, device.network_latency
    )


def _flat(operation: str, nbytes: float, ranks: int, bandwidth: float, latency: float) -> float:
    if ranks == 1:
        return 0.0
    rounds = ceil(log2(ranks)) * (2 if operation == "all_reduce" else 1)
    return rounds * latency + (_SENT[operation](nbytes, ranks) / bandwidth if bandwidth else 0.0)
