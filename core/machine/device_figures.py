"""``DeviceFigures``, the best that a kind of device can do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class DeviceFigures:
    """The figures of a device that decide which splits of a model fit it, and how fast they are at best.

    Attributes:
        name: as ``opgraft plan --device`` takes it.
        memory: bytes.
        bandwidth: of the memory, in bytes per second.
        flops: operations per second by dtype, a multiplication and an addition being two; ``""`` is for all others.
        link: bytes per second that a device can send to those it is linked with.
        linked: how many devices are linked with each other, such as those of a host.
        network: bytes per second that a device can send to others; ``link`` where it is not given.
        latency: seconds until the first byte arrives over ``link``.
        network_latency: the same over the network.
        layer_seconds: seconds that each layer takes beside its reading and computing, as to launch its kernels.
        source: who says so.
    """

    name: str
    memory: float
    bandwidth: float
    flops: Mapping[str, float] = field(default_factory=dict)
    link: float = 0.0
    linked: int = 8
    network: float = 0.0
    latency: float = 3e-6
    network_latency: float = 10e-6
    layer_seconds: float = 0.0
    source: str = ""
