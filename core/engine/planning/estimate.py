"""Estimate the best time of a step: reading, computing and sending at the speed of the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log2
from types import MappingProxyType

from opgraft.distributed.layout import ParallelLayout
from opgraft.engine.planning.imagined import Transfer
from opgraft.engine.planning.shard import Shard, ShardStep, Work
from opgraft.machine.device_figures import DeviceFigures

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
"""Collective → the least bytes through the link of the busiest rank, in the busier direction.

Thakur et al., 2005, doi:10.1177/1094342005051521.
"""

_IN_PARTS = frozenset({"all_reduce", "reduce_scatter", "all_to_all"})
"""Collectives between hosts with a part of the tensor on each device of a host."""


@dataclass(frozen=True)
class Seconds:
    """The time of a rank's part of a step, in seconds.

    Attributes:
        weights: reading weights, or computing with them.
        cache: reading the cache, or computing with it.
        collectives: sending.
        layers: the time that each layer takes in any case, such as launches.
    """

    weights: float
    cache: float
    collectives: float
    layers: float

    @property
    def total(self) -> float:
        """The sum: nothing overlaps."""
        return self.weights + self.cache + self.collectives + self.layers


def sent_bytes(transfers: Iterable[Transfer], layout: ParallelLayout) -> dict[str, float]:
    """Return kind of group → bytes that a rank sends or receives, in the busier direction."""
    sums: dict[str, float] = {}
    # Layers make the same collectives, so most transfers occur many times.
    for (kind, operation, nbytes), times in Counter(transfers).items():
        ranks = len(layout.groups(kind)[0])
        sent = _SENT[operation](nbytes, ranks)
        sums[kind] = sums.get(kind, 0.0) + times * sent
    return sums


def seconds_of(
    shard: Shard, step: ShardStep, layout: ParallelLayout, rank: int, device: DeviceFigures
) -> Seconds:
    """Estimate the time of a rank's part of a step.

    Args:
        shard: the shard of the rank.
        step: the rank's part of the step.
        layout: the layout of all ranks.
        rank: the number of the rank in the job. Ranks fill one host after the other.
        device: the figures of each rank's device.
    """
    dtype = str(shard.dtype).removeprefix("torch.")
    # Figures without a dtype are those of any dtype.
    flops_of_any = device.flops.get("")
    flops = device.flops.get(dtype, flops_of_any)
    collectives = 0.0
    for transfer, times in Counter(step.transfers).items():
        [group] = [each for each in layout.groups(transfer.kind) if rank in each]
        collectives += times * _seconds_of_transfer(transfer, group, device)
    return Seconds(
        weights=_seconds_of_work(step.weights, device.bandwidth, flops),
        cache=_seconds_of_work(step.cache, device.bandwidth, flops),
        collectives=collectives,
        layers=shard.layers * device.layer_seconds,
    )


def _seconds_of_work(work: Work, bandwidth: float, flops: float | None) -> float:
    """Return the time of reading or computing: the longer one limits the work.

    This is the roofline model (Williams et al., 2009, doi:10.1145/1498765.1498785).
    """
    reading = work.nbytes / bandwidth
    computing = work.flops / flops if flops else 0.0
    return max(reading, computing)


def _seconds_of_transfer(transfer: Transfer, ranks: Sequence[int], device: DeviceFigures) -> float:
    """Return the time of a collective: within each host, then between hosts."""
    operation = transfer.operation
    # A host has as many devices as have links to each other.
    hosts = len({rank // device.linked for rank in ranks})
    ranks_of_host = ceil(len(ranks) / hosts)
    network = device.network or device.link
    network_bytes: float = transfer.nbytes
    if operation in _IN_PARTS:
        network_bytes /= ranks_of_host
    nbytes = transfer.nbytes
    in_host = (ranks_of_host, device.link, device.latency)
    in_network = (hosts, network, device.network_latency)
    within = _seconds_in_network(operation, nbytes, *in_host)
    between = _seconds_in_network(operation, network_bytes, *in_network)
    return within + between


def _seconds_in_network(
    operation: str, nbytes: float, ranks: int, bandwidth: float, latency: float
) -> float:
    """Return the time of a collective between ranks with equal links."""
    if ranks == 1:
        return 0.0
    rounds = ceil(log2(ranks))
    # A reduction, and the distribution of the result.
    if operation == "all_reduce":
        rounds *= 2
    sending = _SENT[operation](nbytes, ranks) / bandwidth if bandwidth else 0.0
    return rounds * latency + sending
