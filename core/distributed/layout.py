"""The place of each rank in a job, and the groups of ranks."""

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
"""Kind of group → the common part of the places of the ranks."""

KINDS = tuple(_SHARED)
"""The kinds of groups. Every rank is in one group of each."""


@dataclass(frozen=True)
class ParallelLayout:
    """The numbers of ranks along each way to share a model.

    ``rank = (data · pipelines + pipeline) · tensors + tensor``. Neighbours mostly have the
    fastest connection, so they are shards of the same tensors.

    The ranks of a tensor group differ in the shard only, of a pipeline group in the stage only, and
    of a data group in the replica only. An expert group holds all ranks of one pipeline stage, in
    ascending order.

    Example: with ``tensor=2`` and ``pipeline=2``, the tensor groups are ``(0, 1)`` and ``(2, 3)``.

    Attributes:
        tensor: ranks that share each layer.
        pipeline: ranks with different layers.
        data: ranks with other requests and the same weights. An expert group may share experts.

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
                    f"the number of {field.name}-parallel ranks is {size!r}, expected a positive "
                    "integer"
                )

    @property
    def world(self) -> int:
        """The number of all ranks."""
        return self.data * self.pipeline * self.tensor

    def place(self, rank: int) -> Place:
        """Return the place of a rank, each part counted from 0."""
        rest, tensor = divmod(rank, self.tensor)
        data, pipeline = divmod(rest, self.pipeline)
        return data, pipeline, tensor

    def groups(self, kind: str) -> list[tuple[int, ...]]:
        """Return the ranks of each group of a kind of ``KINDS``, in ascending order."""
        shared_part = _SHARED[kind]
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            shared = shared_part(self.place(rank))
            found.setdefault(shared, []).append(rank)
        return [tuple(ranks) for ranks in found.values()]
