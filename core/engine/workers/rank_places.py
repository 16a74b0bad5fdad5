"""``RankPlaces``: the hosts and devices of all ranks of a job."""

from __future__ import annotations

from dataclasses import dataclass

THIS_HOST = "localhost"
"""The address of the only host of a job."""


@dataclass(frozen=True)
class RankPlaces:
    """The hosts and devices of all ranks, as one rank of the job sees them.

    For example, ``RankPlaces(2, ("10.0.0.1", "10.0.0.1", "10.0.0.2"), (0, 1, 0))`` describes the
    third rank, alone on its host.

    Attributes:
        rank: of this process.
        hosts: the address of each rank's host; empty texts if a launcher has started processes on
            several hosts, or does not tell how many are on one.
        local_ranks: the number of each rank on its host.
        devices: the device of each rank on its host, as Ray has reserved it; empty if the local
            rank chooses the device.
    """

    rank: int
    hosts: tuple[str, ...]
    local_ranks: tuple[int, ...]
    devices: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.hosts)
