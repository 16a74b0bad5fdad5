"""Replicas that share the experts of a model: the tokens of one engine, whoever has work, and none waits for ever."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from conftest import Site
from opgraft import SamplingParams
from opgraft.config import ParallelConfig
from opgraft.errors import ConfigError, EngineError
from opgraft.serving.async_llm import AsyncLLM
from opgraft.serving.llm import LLM
from opgraft.serving.replicas import Rounds, expect_rounds
from serving.test_replicas import ended, holder, kill, last, prompts
from support.random_decoders import written
from support.warm.interpreter import process_of

pytestmark = pytest.mark.usefixtures("warm_workers")

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 64,
    "block_size": 4,
    "cache.num_blocks": 64,
    "load.progress": False,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 24,
}
TOGETHER = {**SETTINGS, "parallel.data": 2, "parallel.expert": 2}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rounds") / "mixtral"
    written("Mixtral", folder, num_local_experts=8, num_experts_per_tok=2, num_hidden_layers=2)
    return folder


def worked(pids: list[int]) -> float:
    """The processor time of processes, in ticks."""
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(stat[11]) + int(stat[12]) for stat in stats)


def rounds_of(llm: AsyncLLM) -> list[int]:
    """The rounds that each replica has made."""
    return [each.rounds_made for each in llm.replicas.each]


def test_replicas_share_experts(checkpoint: Path) -> None:
    """Even and uneven loads, one replica idle, aborts and idleness; a lost one ends all, as its experts are gone."""
    given = [[token % 90 + 5 for token in prompt] for prompt in prompts(5)]
    params = [
        SamplingParams(temperature=0, max_tokens=4 + 8 * number, ignore_eos=True)
        for number in range(5)
    ]
    with LLM(str(checkpoint), **SETTINGS) as alone:
        expected = [output.outputs[0].token_ids for output in alone.generate(given, params)]

    async def body(llm: AsyncLLM) -> None:
        await llm.warm_up()
        asked = list(zip(given, params, strict=True))
        found = await asyncio.gather(*(last(llm, *each) for each in asked))
        assert [output.outputs[0].token_ids for output in found] == expected
        rounds = rounds_of(llm)
        assert rounds[0] == rounds[1] > 30
        # One at a time: the other replica has none.
        found = [await last(llm, *each) for each in asked[:3]]
        assert [output.outputs[0].token_ids for output in found] == expected[:3]
        async with aclosing(llm.generate(*asked[4])) as left:
            await anext(left)
            await last(llm, *asked[3])
        assert (await last(llm, *asked[2])).outputs[0].token_ids == expected[2]
        workers = [
            process_of(worker.process.pid)
            for each in llm.replicas.each
            for worker in each.engine.core.executor.workers.links
        ]
        await asyncio.sleep(0.2)
        before, rounds = worked(workers), rounds_of(llm)
        await asyncio.sleep(1)
        assert rounds_of(llm) == rounds
        assert worked(workers) - before <= 20  # a worker that spins takes 100 ticks in this second
        streams = [
            llm.generate(*each, request_id=str(number)) for number, each in enumerate(asked[3:])
        ]
        for stream in streams:
            await anext(stream)
        started = time.monotonic()
        kill(holder(llm, "0"))
        answers = [(await ended(stream)).outputs[0] for stream in streams]
        assert [answer.finish_reason for answer in answers] == ["error", "error"]
        assert all(
            "the process of the worker has ended, with the status -9" in str(answer.error)
            for answer in answers
        )
        assert time.monotonic() - started < 5
        with pytest.raises(EngineError, match="2 of 2 replicas are lost"):
            await llm.check_health()

    async def main() -> None:
        async with AsyncLLM(str(checkpoint), **TOGETHER) as llm:
            await asyncio.wait_for(body(llm), 60)

    asyncio.run(main())


PLANTED = """
import time
import opgraft
from opgraft.distributed import get_world_group
from opgraft.engine.workers.worker import Worker

platforms = "any"


class Failing(Worker):
    def load_model(self):
        if get_world_group().rank == 1:
            raise RuntimeError("planted")
        time.sleep(1000)


@opgraft.hookimpl
def opgraft_register_ops(platform):
    Worker.register_oot(Failing)
"""


def test_a_replica_that_does_not_start_ends_the_others(
    checkpoint: Path,
    site: Site,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What fails first is raised, while another would have waited for ever; what that comes to is in the log."""
    site.plugin("planted-start", PLANTED)
    with pytest.raises(RuntimeError, match="planted"):
        LLM(str(checkpoint), **TOGETHER, **{"parallel.start_seconds": 60})
    assert "replica 0 did not start either" in caplog.text
    assert "did not come to the end of a call" not in caplog.text


class Member:
    """One of those that make rounds, which notes when it is woken."""

    def __init__(self, name: str, woken: list[str]) -> None:
        self.rounds_made = 0
        self.look = lambda: woken.append(name)


def test_everyone_makes_each_round_once() -> None:
    """Who has work opens rounds, the others are woken for each that they have not made, and then nobody is behind."""
    woken: list[str] = []
    rounds = Rounds()
    first, second, third = rounds.members = [Member(name, woken) for name in "abc"]
    rounds.enter(first)
    rounds.enter(first)
    assert woken == ["b", "c"] * 2
    assert not rounds.is_behind(first)
    for member in (second, third):
        rounds.enter(member)
        assert rounds.is_behind(member)
        rounds.enter(member)
        assert not rounds.is_behind(member)
    assert len(woken) == 4
    rounds.enter(third)
    assert woken[4:] == ["a", "b"]
    assert rounds.is_behind(first)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"executor": "in_process"}, "processes"),
        ({"executor": "ray"}, "ray, where each replica is a job of its own.*parallel.data to 1"),
        ({"pipeline": 2}, "stages"),
        ({"restart_workers": 1}, "none can be replaced.*exit code 5"),
        ({"on_replica_loss": "move"}, "none is left"),
    ],
)
def test_what_rounds_cannot_be_made_of_is_refused(values: dict[str, Any], match: str) -> None:
    """Replicas in one process, or of several stages, do not share experts."""
    with pytest.raises(ConfigError, match=match):
        expect_rounds(ParallelConfig(data=2, expert=2, **values))
