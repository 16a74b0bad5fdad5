"""Collectives over shared memory: what gloo's compute, for ranks that live, and errors in time where one does not."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft import distributed
from opgraft.distributed.communicator import Communicator
from opgraft.engine.core import EngineCore
from opgraft.testing.contracts import check_attention_layout, check_communicator
from support.engines import prompts, recorded, replaced, serve, settings
from support.random_decoders import written
from support.ranks import Ranks

SUMMED = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)
SHAPES = ((1,), (7,), (3, 5), (8, 576), (5, 4, 6), (0, 4), (2, 300_001))


@pytest.fixture(scope="module")
def two(installed: Path) -> Iterator[Ranks]:
    with Ranks(2, path=[str(installed)], plugins="cpu_kernels") as ranks:
        yield ranks


@pytest.fixture(scope="module")
def three(installed: Path) -> Iterator[Ranks]:
    with Ranks(3, path=[str(installed)], plugins="cpu_kernels") as ranks:
        yield ranks


def own(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """What each rank brings along: small integers where they are summed in integers."""
    generator = torch.Generator().manual_seed(distributed.get_world_group().rank)
    x = torch.randn(shape, generator=generator) * 10
    return (x.abs() if dtype is torch.uint8 else x).to(dtype)


def communicator() -> Any:
    found = distributed.get_tp_group().communicator
    assert type(found).__name__ == "SharedMemoryCommunicator"
    assert found.shared is not None, found.obstacle
    return found


def collectives(kind: type[Communicator], x: torch.Tensor) -> list[torch.Tensor | None]:
    """Results of every collective, by that class's methods."""
    group, ranks = communicator(), distributed.get_world_group().world_size
    many = torch.cat([x] * ranks)
    rows = [(rank + 1) % 2 * x.shape[0] for rank in range(ranks)]
    received = [rows[group.rank] for _ in range(ranks)]
    return [
        kind.all_reduce(group, x),
        kind.all_gather(group, x),
        kind.all_gather(group, x, 0),
        kind.gather(group, x, 1, -1),
        kind.reduce_scatter(group, many, 0),
        kind.reduce_scatter(group, torch.cat([x, x * 0, x][:ranks], -1).contiguous(), -1),
        kind.broadcast(group, x, ranks - 1),
        kind.all_to_all(group, torch.cat([x[:0], *[x] * (ranks + 1 >> 1)]), rows, received),
    ]


def compared(shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """See that results are gloo's for that shape, contiguous and not; return those of the sum, for other ranks."""
    x = own(dtype, *shape)
    strided = own(dtype, *shape, 2).select(-1, 0)
    sums = []
    for given in (x, strided, x.movedim(0, -1)):
        before = given.clone()
        ours, theirs = (collectives(kind, given) for kind in (type(communicator()), Communicator))
        assert torch.equal(given, before)
        for mine, other in zip(ours, theirs, strict=True):
            assert (mine is None) == (other is None)
            if mine is not None and other is not None:
                assert mine.is_contiguous()
                torch.testing.assert_close(mine, other)
        sums.append(ours[0])
    return sums


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", SUMMED, ids=str)
def test_results_are_those_of_gloo(two: Ranks, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Every collective, of odd sizes too and of views; sums are the same bits on both ranks."""
    first, second = two.run(compared, shape, dtype)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("shape", [(3, 5), (2, 300_001)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_three_ranks(three: Ranks, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Of several ranks each sums a part of a large tensor, and all have the same bits, rounded once."""
    results = three.run(compared_sum, shape, dtype)
    for summed, _ in results:
        assert torch.equal(summed, results[0][0])
        wide = sum(x.double() for _, x in results)
        torch.testing.assert_close(
            summed.double(), wide, rtol=2**-8 if dtype is torch.bfloat16 else 1e-6, atol=1e-5
        )


def compared_sum(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    x = own(dtype, *shape)
    communicator()
    return distributed.tensor_model_parallel_all_reduce(x), x


def keeps() -> None:
    check_communicator(communicator())


def test_the_contract_of_communicators(two: Ranks, three: Ranks) -> None:
    """What is asked of every communicator holds, for sums of two ranks and of several."""
    two.run(keeps)
    three.run(keeps)


def test_the_contract_of_attention(plugin: Path) -> None:
    """Attention over the plugin's layout is attention."""
    check_attention_layout()


def others() -> None:
    group, x = communicator(), own(torch.float32, 4, 3)
    assert torch.equal(group.all_gather(x > 0), Communicator.all_gather(group, x > 0))
    assert torch.equal(
        group.all_gather(x.to(torch.complex64).conj()),
        Communicator.all_gather(group, x.to(torch.complex64)),
    )
    assert torch.equal(
        group.all_reduce(x.to(torch.complex64)),
        Communicator.all_reduce(group, x.to(torch.complex64)),
    )
    assert group.all_gather(torch.tensor(float(group.rank))).tolist() == [0.0, 1.0]
    with pytest.raises(IndexError, match="dim is 5"):
        group.all_gather(x, 5)


def test_other_dtypes(two: Ranks) -> None:
    """Truth values and complex numbers are moved, and what is no plain sum is left to gloo."""
    two.run(others)


def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = distributed.tensor_model_parallel_all_reduce(x * 2) + 1
    return (
        y,
        distributed.tensor_model_parallel_all_gather(y),
        distributed.tensor_model_parallel_reduce_scatter(y, 0),
    )


def compiled() -> Any:
    communicator()
    torch.compiler.reset()
    program = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    return [(program(x), step(x)) for x in (own(torch.float32, 4, 6), own(torch.float32, 8, 6))]


def test_compiled(two: Ranks) -> None:
    """Compiled code reaches them through the registered ops."""
    for pairs in two.run(compiled):
        torch.testing.assert_close(*zip(*pairs, strict=True))


def many_steps(count: int) -> None:
    """Sums of which a rank that reads too late, or writes too early, would spoil some."""
    group = communicator()
    for number in range(count):
        x = torch.full((1 + number % 700,), float(number + group.rank))
        group.gather(x, number % 2, 0)
        summed = group.all_reduce(x)
        assert summed.eq(2 * number + 1).all(), number
        sent = group.broadcast(x, number % 2)
        assert sent.eq(number + number % 2).all(), number


def test_many_collectives_in_a_row(two: Ranks) -> None:
    """Ranks that run ahead of each other write over nothing that is still to be read."""
    two.run(many_steps, 2000)


def served(folder: str) -> tuple[list[list[int]], list[torch.Tensor], dict[str, str]]:
    """Serve prompts by kernels that read the weights as they are for any number of rows."""
    import opgraft_cpu_kernels

    before = opgraft_cpu_kernels.path()
    opgraft_cpu_kernels.set_path("avx512_bf16")
    try:
        return _served(folder)
    finally:
        opgraft_cpu_kernels.set_path(before)


def _served(folder: str) -> tuple[list[list[int]], list[torch.Tensor], dict[str, str]]:
    given = settings(Path(folder), max_num_batched_tokens=21, max_model_len=64)
    core = EngineCore(replaced(given, cache={"block_size": 16, "num_blocks": 24}))
    pairs = [
        recorded(f"r{number}", prompt, 12) for number, prompt in enumerate(prompts(5, 17, 9, 3))
    ]
    serve(core, [request for request, _ in pairs])
    logits = [torch.stack(list(recorder.logits.values())) for _, recorder in pairs]
    remarks = {row.name: row.remark for row in core.explain().classes}
    return [request.output for request, _ in pairs], logits, remarks


@pytest.mark.parametrize(
    "heads", [{"num_attention_heads": 4}, {"num_attention_heads": 6, "num_key_value_heads": 3}]
)
def test_decoders_in_one_call(
    plugin: Path, two: Ranks, tmp_path: Path, heads: dict[str, int]
) -> None:
    """Ranks that share layers compute them in one call, as one rank does, and give its tokens and logits."""
    import opgraft_cpu_kernels

    if "avx512_bf16" not in opgraft_cpu_kernels.paths():
        pytest.skip("this CPU lacks avx512_bf16")
    biases = {"attention_bias": True, "mlp_bias": True}
    written(
        "Llama", tmp_path, hidden_size=192, intermediate_size=128, head_dim=32, **heads, **biases
    )
    outputs, logits, _ = served(str(tmp_path))
    for found, there, remarks in two.run(served, str(tmp_path)):
        assert found == outputs
        for ours, theirs in zip(there, logits, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        assert remarks["communicator"].startswith("2 ranks of this host, over shared memory")
        calls = remarks["decoder_plan"].split()
        assert int(calls[0]) == int(calls[2]) > 0, remarks


def mapped() -> list[str]:
    """What of the memory has a name, and what this process has mapped."""
    communicator()
    lines = Path("/proc/self/maps").read_text().splitlines()
    shared = [path.name for path in Path("/dev/shm").iterdir()]  # noqa: S108  # where names would be
    return sorted({line.split(maxsplit=5)[5] for line in lines if "memfd:opgraft" in line}) + shared


def test_the_memory_has_no_name(two: Ranks) -> None:
    """Nothing stands in /dev/shm, so that nothing can be left there, and no descriptor stays open."""
    for names in two.run(mapped):
        assert any("memfd:opgraft (deleted)" in name for name in names)
        assert not any("opgraft" in name and "memfd" not in name for name in names)


def elsewhere(name: str, *told: Any) -> tuple[str, str]:
    """Set up a group anew where ranks tell each other something else; it works all the same."""
    import opgraft_cpu_kernels.communicator as module

    group, kept = communicator(), getattr(module, name)
    setattr(module, name, lambda: told[group.rank])
    try:
        other = type(group)(group.process_group, group.ranks, group.rank, group.name)
    finally:
        setattr(module, name, kept)
    assert other.shared is None
    assert torch.equal(other.all_reduce(torch.ones(3)), torch.full((3,), 2.0))
    return other.obstacle, other.remark(None)


@pytest.mark.parametrize(
    ("name", "told", "reason"),
    [
        ("_host", ("one", "another"), "rank 1 of the group is on another host"),
        ("_host", ("", ""), "rank 0 of the group is on another host"),
        (
            "missing",
            (None, "the library was not built"),
            "on rank 1 of the group the library was not built",
        ),
    ],
)
def test_ranks_without_common_memory(
    two: Ranks, name: str, told: tuple[Any, ...], reason: str
) -> None:
    """On several hosts, or where one rank lacks the library, all ranks agree to use gloo, and say why."""
    for obstacle, remark in two.run(elsewhere, name, *told):
        assert reason in obstacle
        assert remark == f"by torch.distributed, as {obstacle}"


def bound_to(*processors: int) -> str:
    """Set up a group anew where each rank is bound to a processor, and sum there while the second comes late."""
    group, before = communicator(), os.sched_getaffinity(0)
    os.sched_setaffinity(0, {processors[group.rank]})
    try:
        other = type(group)(group.process_group, group.ranks, group.rank, group.name)
        time.sleep(0.002 * group.rank)
        assert other.all_reduce(torch.full((3,), 1.0 + group.rank)).eq(3).all()
        calls, given, taken, waited = other.shared.used()
        assert (calls, given) == (1, 12)
        assert 0 <= waited < taken
        return str(other.remark(None))
    finally:
        os.sched_setaffinity(0, before)


def test_ranks_that_are_bound_to_processors(two: Ranks) -> None:
    """Who waits spins where each rank has a processor of its own, sleeps at once where they share one."""
    first, *others = sorted(os.sched_getaffinity(0))
    for remark in two.run(bound_to, first, first):
        assert (
            remark == "2 ranks of this host, over shared memory, with fewer processors than ranks"
        )
    if not others:
        pytest.skip("this process may run on one processor only")
    for remark in two.run(bound_to, first, others[0]):
        assert remark == "2 ranks of this host, over shared memory"


def forbidden() -> str:
    """Set up a group anew where the system gives no memory."""
    group, kept = communicator(), os.memfd_create

    def refuse(*args: Any) -> int:
        raise PermissionError(1, "Operation not permitted")

    os.memfd_create = refuse
    try:
        other = type(group)(group.process_group, group.ranks, group.rank, group.name)
    finally:
        os.memfd_create = kept
    assert torch.equal(other.all_reduce(torch.ones(3)), torch.full((3,), 2.0))
    return str(other.obstacle)


def test_a_system_that_gives_no_memory(two: Ranks) -> None:
    """Where only the first rank learns of it, all use gloo."""
    for obstacle in two.run(forbidden):
        assert (
            "this system gives no memory to share ([Errno 1] Operation not permitted)" in obstacle
        )


def fails() -> Any:
    """What a collective raises on the rank that is there, and after how many seconds."""
    group = communicator()
    started = time.monotonic()
    with pytest.raises(torch.distributed.DistBackendError) as caught:
        group.all_reduce(torch.ones(3))
    seconds = time.monotonic() - started
    with pytest.raises(torch.distributed.DistBackendError) as again:
        group.broadcast(torch.ones(3))
    assert str(again.value).splitlines()[0] == str(caught.value).splitlines()[0]
    return str(caught.value), seconds


def leaves() -> None:
    communicator().destroy()


def dies() -> None:
    communicator()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("absence", "told", "timeout"),
    [
        (leaves, "rank 1 has left the group", 60),
        (dies, "the process of rank 1 has ended", 60),
        (mapped, "rank 1 has not joined within 2 seconds", 2),
    ],
    ids=["leaves", "is killed", "does something else"],
)
def test_a_rank_that_is_not_there(installed: Path, absence: Any, told: str, timeout: int) -> None:
    """The others name it: at once where it has ended or left, or after the time limit of the groups."""
    with Ranks(2, path=[str(installed)], plugins="cpu_kernels", tensor=2, timeout=timeout) as ranks:
        for end, (function, *args) in zip(ranks.ends, ((fails,), (absence,)), strict=True):
            end.send_bytes(pickle.dumps((__file__, function.__name__, args)))
        assert ranks.ends[0].poll(60)
        good, answer = pickle.loads(ranks.ends[0].recv_bytes())  # noqa: S301  # of our own process
        assert good, answer
        assert told in answer[0]
        assert answer[1] < 30
