"""The formula for which ranks belong together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from opgraft.errors import DistributedError

Place = tuple[int, int, int]
"""The data replica, the pipeline stage and the tensor shard of a rank."""

_SHARED: dict[str, Callable[[Place], tuple[int, ...]]] = {
    "world": lambda place: (),
    "tensor": lambda place: place[:2],
    "pipeline": lambda place: (place[0], place[2]),
    "data": lambda place: place[1:],
    "expert": lambda place: place[1:2],
}
"""Kind of group → what its ranks have in common."""

KINDS = tuple(_SHARED)
"""The kinds of groups. Every rank is in one group of each."""


@dataclass(frozen=True)
class ParallelLayout:
    """The sizes by which ranks share a model: ``rank = (data · pipelines + pipeline) · tensors + tensor``.

    Neighbouring ranks, which mostly have the fastest connection, are shards of the same tensors. A tensor group holds
    the ranks that differ in their shard only, a pipeline group those that differ in their stage only, and a data group
    those that differ in their replica only. An expert group holds all ranks of one pipeline stage, in the order of
    their ranks.

    Attributes:
        tensor: ranks that share each layer.
        pipeline: ranks that have different layers.
        data: ranks that have other requests and the same weights, but for experts that an expert group shares.

    Raises:
        DistributedError: a size is no positive integer.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if not isinstance(size, int) or size < 1:
                raise DistributedError(
                    f"the number of {field.name}-parallel ranks is {size!r}, expected a positive integer"
                )

    @property
    def world(self) -> int:
        """The number of all ranks."""
        return self.data * self.pipeline * self.tensor

    def place(self, rank: int) -> Place:
        """Return the place of a rank, each part counted from 0."""
        rest, tensor = divmod(rank, self.tensor)
        return (*divmod(rest, self.pipeline), tensor)

    def groups(self, kind: str) -> list[tuple[int, ...]]:
        """List the ranks of each group of a kind of ``KINDS``, in ascending order."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            found.setdefault(_SHARED[kind](self.place(rank)), []).append(rank)
        return [tuple(ranks) for ranks in found.values()]
