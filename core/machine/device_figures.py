"""``DeviceFigures``: the best speeds of a kind of device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class DeviceFigures:
    """The figures of a device. They decide the splits of a model that fit, and the best speed.

    Attributes:
        name: a name for ``opgraft plan --device``.
        memory: bytes.
        bandwidth: bytes of memory that can be read per second.
        flops: operations per second by dtype. A multiplication and an addition count as two. The
            entry ``""`` stands for all other dtypes.
        link: bytes per second that the device can send to a linked device.
        linked: the number of devices that are linked with each other, such as those of a host.
        network: bytes per second that the device can send to other devices. 0 stands for ``link``.
        latency: seconds until the first byte arrives over ``link``.
        network_latency: seconds until the first byte arrives over the network.
        layer_seconds: seconds of a layer beside reading and computing, such as to launch kernels.
        source: the data sheet or measurement behind the figures.
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
