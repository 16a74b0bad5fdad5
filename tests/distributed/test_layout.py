"""The formula for which ranks belong together."""

from __future__ import annotations

import pytest
from opgraft.distributed.layout import KINDS, ParallelLayout
from opgraft.errors import DistributedError

LAYOUTS = [
    ParallelLayout(*sizes)
    for sizes in [(1, 1, 1), (2, 1, 1), (2, 2, 2), (4, 3, 2), (1, 2, 3), (3, 1, 2)]
]


def test_groups_of_eight_ranks() -> None:
    """Of two by two by two ranks, tensor is fastest, then pipeline, then data; expert is data and tensor of a stage."""
    layout = ParallelLayout(tensor=2, pipeline=2, data=2)
    assert layout.groups("tensor") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert layout.groups("pipeline") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert layout.groups("data") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert layout.groups("expert") == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert layout.groups("world") == [tuple(range(8))]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_is_in_one_group_of_each_kind(layout: ParallelLayout) -> None:
    """Groups of a kind are equally large and share out all ranks, at places that the formula gives back."""
    sizes = {
        "world": layout.world,
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "data": layout.data,
        "expert": layout.data * layout.tensor,
    }
    for kind in KINDS:
        groups = layout.groups(kind)
        assert {len(group) for group in groups} == {sizes[kind]}
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world))
    for rank in range(layout.world):
        data, pipeline, tensor = layout.place(rank)
        assert (data * layout.pipeline + pipeline) * layout.tensor + tensor == rank


@pytest.mark.parametrize("size", [0, -1, 1.5, "2"])
def test_sizes_that_are_none(size: object) -> None:
    """A size is a positive integer."""
    with pytest.raises(DistributedError, match="the number of pipeline-parallel ranks is"):
        ParallelLayout(pipeline=size)  # type: ignore[arg-type]
