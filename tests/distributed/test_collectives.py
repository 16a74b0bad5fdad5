"""Collectives on real ranks, and the groups of a process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import opgraft
import pytest
import torch
from opgraft import distributed
from opgraft.distributed.groups import parallelism
from opgraft.errors import DistributedError
from support.ranks import Ranks
from torch import distributed as dist


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4, tensor=2, pipeline=2, timeout=77) as ranks:
        yield ranks


def own(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What each rank brings along."""
    torch.manual_seed(distributed.get_world_group().rank)
    return torch.randn(shape).to(dtype)


def collectives(dtype: torch.dtype) -> tuple[Any, ...]:
    x = own(3, 4, dtype=dtype)
    before = x.clone()
    results = (
        x,
        distributed.tensor_model_parallel_all_reduce(x),
        distributed.tensor_model_parallel_all_gather(x),
        distributed.tensor_model_parallel_all_gather(x, 0),
        distributed.tensor_model_parallel_reduce_scatter(x),
        distributed.tensor_model_parallel_gather(x),
        distributed.get_tp_group().broadcast(x, 1),
    )
    assert torch.equal(x, before)
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_collectives(two: Ranks, dtype: torch.dtype) -> None:
    """Each gives what plain torch gives of what the ranks had, and writes to no input."""
    first, second = two.run(collectives, dtype)
    a, b = first[0], second[0]
    for rank, (_, summed, last, rows, part, gathered, sent) in enumerate((first, second)):
        torch.testing.assert_close(summed, a + b)
        assert torch.equal(last, torch.cat((a, b), -1))
        assert torch.equal(rows, torch.cat((a, b), 0))
        torch.testing.assert_close(part, (a + b).chunk(2, -1)[rank])
        assert torch.equal(sent, b)
        assert (gathered is None) == (rank == 1)
    assert torch.equal(first[5], torch.cat((a, b), -1))


def numbers() -> tuple[Any, ...]:
    number = torch.tensor(1.5 + distributed.get_tensor_model_parallel_rank())
    compiled = torch.compile(
        distributed.tensor_model_parallel_all_gather, fullgraph=True, backend="eager"
    )
    return (
        distributed.tensor_model_parallel_all_gather(number),
        compiled(number),
        distributed.tensor_model_parallel_gather(number),
        distributed.tensor_model_parallel_all_reduce(number),
    )


def test_single_numbers(two: Ranks) -> None:
    """A tensor without dimensions is gathered as a vector of one, and added up as it is."""
    for rank, (gathered, compiled, on_first, summed) in enumerate(two.run(numbers)):
        assert gathered.tolist() == compiled.tolist() == [1.5, 2.5]
        assert on_first is None if rank else on_first.tolist() == [1.5, 2.5]
        assert (summed.shape, float(summed)) == ((), 4.0)


def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = distributed.tensor_model_parallel_all_reduce(x * 2) + 1
    return (
        y,
        distributed.tensor_model_parallel_all_gather(y),
        distributed.tensor_model_parallel_reduce_scatter(y, 0),
    )


def compiled(backend: str) -> list[Any]:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    program = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    pairs = [(program(x), step(x)) for x in (own(4, 6), own(6, 6), own(8, 6))]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return [pairs, graphs]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_whole(two: Ranks, backend: str) -> None:
    """Collectives compile without a break, once for all sizes, and compute the same."""
    for pairs, graphs in two.run(compiled, backend):
        assert graphs == 1
        for got, expected in pairs:
            torch.testing.assert_close(got, expected)


def opcheck() -> None:
    for name, arguments in (("all_reduce", ()), ("all_gather", (1, 2)), ("reduce_scatter", (1, 2))):
        op = getattr(torch.ops.opgraft, name).default
        torch.library.opcheck(
            op, (own(2, 4), *arguments, "tensor"), test_utils=("test_schema", "test_faketensor")
        )


def test_fake_rules(two: Ranks) -> None:
    """The registered ops have the shapes, dtypes and strides that their fake rules tell."""
    two.run(opcheck)


def places() -> dict[str, Any]:
    groups = parallelism().groups.values()
    x = torch.tensor([float(distributed.get_world_group().rank)])
    return {
        group.kind: (group.ranks, group.rank_in_group, group.all_gather(x).tolist())
        for group in groups
    }


def test_groups_of_four_ranks(four: Ranks) -> None:
    """Two stages of two shards: each rank talks to those that the formula names."""
    found = four.run(places)
    assert [row["tensor"][0] for row in found] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [row["pipeline"][0] for row in found] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    for row in found:
        assert all(list(ranks) == gathered for ranks, _, gathered in row.values())


def time_limits() -> set[float]:
    groups = [group.communicator for group in parallelism().groups.values()]
    return {each.time_limit for each in groups if each is not None}


def test_the_time_limit_holds_for_every_group(four: Ranks) -> None:
    """Groups of some ranks have the limit that was given, not torch's half an hour."""
    assert four.run(time_limits) == [{77.0}] * 4


def passes_on() -> Any:
    group = distributed.get_pp_group()
    assert group.communicator is not None
    if group.is_first_rank:
        group.communicator.send(torch.arange(6.0).view(2, 3).t(), 1)
        return None
    assert group.is_last_rank
    return group.communicator.recv((3, 2), torch.float32, "cpu", 0)


def test_stages_pass_tensors_on(four: Ranks) -> None:
    """What the first stage sends, the second receives."""
    *_, third, fourth = four.run(passes_on)
    assert torch.equal(third, torch.arange(6.0).view(2, 3).t())
    assert torch.equal(fourth, third)


def test_alone_no_process_group_is_needed() -> None:
    """One rank has groups of size 1, whose collectives return the tensor itself."""
    distributed.init_distributed()
    x = torch.randn(2, 2)
    assert distributed.tensor_model_parallel_all_reduce(x) is x
    assert distributed.tensor_model_parallel_all_gather(x) is x
    assert distributed.tensor_model_parallel_reduce_scatter(x) is x
    assert distributed.tensor_model_parallel_gather(x) is x
    assert distributed.get_tp_group().broadcast(x) is x
    assert (
        distributed.get_tensor_model_parallel_rank(),
        distributed.get_tensor_model_parallel_world_size(),
    ) == (0, 1)
    assert distributed.get_pp_group().is_first_rank
    assert distributed.get_pp_group().is_last_rank
    assert not dist.is_initialized()


def test_groups_are_set_up_once() -> None:
    """A second set of groups is refused, until the first is given back or the host is reset."""
    distributed.init_distributed()
    with pytest.raises(DistributedError, match="set up already"):
        distributed.init_distributed()
    distributed.destroy_distributed()
    distributed.init_distributed()
    opgraft.reset()
    distributed.init_distributed()


def again(sizes: dict[str, int]) -> str:
    opgraft.reset()
    with pytest.raises(DistributedError) as caught:
        distributed.init_distributed(**sizes)
    distributed.init_distributed(2)
    return str(caught.value)


def test_sizes_that_are_not_those_of_the_job(two: Ranks) -> None:
    """The error names the sizes and what they make."""
    assert (
        "the job has 2 ranks, but tensor 2, pipeline 1 and data 2 make 4"
        in two.run(again, {"tensor": 2, "data": 2})[0]
    )


def test_code_compiled_for_ranks_that_are_gone() -> None:
    """A registered op says what is missing where its group is of one rank."""
    with pytest.raises(DistributedError, match="init_distributed"):
        torch.ops.opgraft.all_reduce(torch.randn(2), "tensor")


def scatters_a_rest() -> None:
    with pytest.raises(
        DistributedError, match=r"2 ranks do not divide dimension -1 of shape \(2, 3\)"
    ):
        distributed.tensor_model_parallel_reduce_scatter(own(2, 3))


def test_what_ranks_do_not_divide(two: Ranks) -> None:
    """Scattering a rest is refused."""
    two.run(scatters_a_rest)
