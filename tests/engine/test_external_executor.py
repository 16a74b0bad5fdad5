"""Processes that a launcher has started are the ranks of one engine, which each of them drives."""

from __future__ import annotations

import os
import socket
import subprocess
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from engine.test_worker_process import IN_ITS_PROCESS, folder
from opgraft import LLM, SamplingParams
from opgraft.config.environment import Launch, read_launch
from opgraft.distributed import destroy_distributed, get_tp_group, get_world_group
from opgraft.engine.core import EngineCore
from opgraft.engine.request import Request
from opgraft.engine.workers.executors import _places_of_launch
from opgraft.engine.workers.rank_places import RankPlaces
from opgraft.errors import ConfigError, DistributedError, EngineError
from opgraft.ops import RMSNorm
from support.engines import news, prompts, replaced, settings
from support.ranks import Ranks

__all__ = ["folder"]

SCRIPT = """
import sys
from opgraft import LLM, SamplingParams
from opgraft.distributed import get_world_group

settings = {"cache.num_blocks": 64, "load.progress": False}
llm = LLM(sys.argv[1], tensor_parallel_size=2, max_model_len=64, dtype="float32", **settings)
outputs = llm.generate(["the cat", "a dog"], SamplingParams(temperature=0, max_tokens=7))
if get_world_group().is_first_rank:
    print([output.outputs[0].token_ids for output in outputs])
llm.shutdown()
"""


def test_torchrun_starts_the_ranks(folder: Path, tmp_path: Path, warm_python: str) -> None:
    """The same script runs on each of two ranks; the first one prints the tokens of one process."""
    with LLM(str(folder), **IN_ITS_PROCESS | {"parallel.executor": "in_process"}) as one:
        outputs = one.generate(["the cat", "a dog"], SamplingParams(temperature=0, max_tokens=7))
    (tmp_path / "answer.py").write_text(SCRIPT)
    launcher = [warm_python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(tmp_path / "answer.py"), str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.splitlines() == [str([output.outputs[0].token_ids for output in outputs])]


def failing_alone(folder: str) -> tuple[list[str], str]:
    """Serve requests while the second rank fails in the middle of a step; return their errors and that of the next."""
    core = EngineCore(settings(Path(folder)))
    assert core.executor.worker is not None
    layer = list(core.executor.worker.runner.model.model.layers)[-1]
    calls, forward = count(1), layer.forward

    def failing(*given: Any) -> Any:
        if next(calls) == 5 and get_world_group().rank == 1:
            raise RuntimeError("kernel trouble")
        return forward(*given)

    layer.forward = failing
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    core.add([Request(f"r{number}", prompt, params) for number, prompt in enumerate(prompts(4, 6))])
    errors = [str(output.error) for output in news(core) if output.error is not None]
    with pytest.raises(EngineError) as caught:
        core.add([Request("late", [5], params)])
    return errors, str(caught.value)


def test_a_rank_that_fails_alone_is_lost_with_the_others(folder: Path) -> None:
    """None waits for it, or goes on with sums of different steps; each says so from then on."""
    with Ranks(2) as two:
        (others, after_others), (own, after_own) = two.run(failing_alone, str(folder))
    assert len(others) == len(own) == 2
    assert all("RuntimeError: kernel trouble" in error for error in own)
    assert (
        "rank 1 of 2 has failed (RuntimeError: kernel trouble), and has left the others"
        in after_own
    )
    assert "rank 0 of 2 has failed" in after_others


class OwnNorm(RMSNorm):
    """A replacement that one rank alone has."""

    def forward_oot(self, x: Any, residual: Any = None) -> Any:
        raise NotImplementedError


def joined(folder: str, ports: list[int]) -> tuple[str, bool, list[list[int]]]:
    """Join as by a launcher: what a rank that differs is told, then whether all ranks have logits, and tokens."""
    rank = get_world_group().rank
    destroy_distributed()
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_PORT": ports[0],
    }
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        **{name: str(value) for name, value in place.items()},
    }
    given = replaced(settings(Path(folder)), parallel={"tensor": 2})
    if rank == 1:
        RMSNorm.register_oot(OwnNorm)
    with pytest.raises(EngineError) as caught:
        EngineCore(given)
    if rank == 1:
        RMSNorm.unregister_oot(OwnNorm)
    os.environ["MASTER_PORT"] = str(
        ports[1]
    )  # the first rank may still have the store at the other
    core = EngineCore(given)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    requests = [
        Request(f"r{number}", prompt, params) for number, prompt in enumerate(prompts(4, 6))
    ]
    core.add(requests)
    assert all(output.error is None for output in news(core))
    communicator = get_tp_group().communicator
    assert communicator is not None
    return str(caught.value), communicator.use_all_gather, [request.output for request in requests]


def test_ranks_compare_what_decides_and_one_samples(folder: Path) -> None:
    """All are told of the one that differs, and none starts; logits are gathered on the first, tokens are on all."""
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        ports = [one.getsockname()[1], other.getsockname()[1]]
    with Ranks(2) as two:
        (told, *first), (told_there, *second) = two.run(joined, str(folder), ports)
    assert told == told_there
    assert "rank 1 would compute otherwise than rank 0" in told
    assert "OwnNorm is none for rank 0, and active for rank 1" in told
    assert "in_process" not in told
    assert first == second
    assert first[0] is False
    assert [len(tokens) for tokens in first[1]] == [5, 5]


def test_more_ranks_than_the_one_of_this_process_are_refused(folder: Path) -> None:
    """The error names both settings, and where more workers run."""
    words = r"parallel.tensor is 3, and parallel.executor is in_process.* set it to processes"
    with pytest.raises(DistributedError, match=words):
        LLM(str(folder), **{"parallel.executor": "in_process", "parallel.tensor": 3})


def test_external_without_a_launcher_is_refused(folder: Path) -> None:
    """The error says how to start such a job."""
    with pytest.raises(
        DistributedError, match=r"no launcher has started this process.*torchrun --nproc-per-node"
    ):
        EngineCore(replaced(settings(folder), parallel={"executor": "external", "tensor": 2}))


def test_a_launcher_says_the_place_of_a_process() -> None:
    """Without its variables the process is alone; what is no number is refused by name."""
    assert read_launch({}) == Launch(1, 0, 1)
    assert read_launch({"WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}) == Launch(
        4, 1, 2, is_on_one_host=False
    )
    with pytest.raises(ConfigError, match="LOCAL_RANK='x' is no number"):
        read_launch({"LOCAL_RANK": "x"})


@pytest.mark.parametrize(
    ("on_each", "host", "local_ranks"),
    [("4", "localhost", (0, 1, 2, 3)), ("2", "", (0, 1, 0, 1)), (None, "", (0, 1, 2, 3))],
)
def test_ranks_are_on_this_host_if_the_launcher_says_so(
    on_each: str | None,
    host: str,
    local_ranks: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks of several hosts, and of a launcher that does not count those of a host, have no address."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    given = {"WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "1"}
    if on_each:
        given["LOCAL_WORLD_SIZE"] = on_each
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert _places_of_launch() == RankPlaces(1, (host,) * 4, local_ranks)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_WORLD_SIZE"])
def test_a_launcher_of_no_process_is_refused(name: str) -> None:
    """A number of processes is at least one; the error names the variable."""
    with pytest.raises(ConfigError, match=f"^{name}='0' is below 1: unset it"):
        read_launch({"WORLD_SIZE": "4", name: "0"})
