"""Several engines behind one front: the answers of one, requests to where their beginnings are, and lost replicas."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from opgraft import SamplingParams
from opgraft.engine.workers.process_executor import LocalProcess
from opgraft.errors import EngineError, RequestError
from opgraft.serving.async_llm import AsyncLLM
from opgraft.serving.engine_settings import engine_config
from opgraft.serving.llm import LLM
from opgraft.serving.outputs import RequestOutput
from opgraft.serving.prometheus import PrometheusExporter
from opgraft.serving.replicas import Replica, Replicas
from opgraft.serving.text_engine import TextEngine
from support.random_decoders import written
from support.small_tokenizers import trained_tokenizer

prometheus = pytest.importorskip("prometheus_client")

pytestmark = pytest.mark.usefixtures("warm_workers")

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "block_size": 4,
    "cache.num_blocks": 160,
    "load.progress": False,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
}
TWO = {**SETTINGS, "parallel.data": 2, "parallel.executor": "in_process"}
APART = {**TWO, "parallel.executor": "processes"}
LONG = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, ignore_eos=True, n=2)
PATIENCE = 60


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replicas") / "llama"
    written("Llama", folder, vocab_size=400, max_position_embeddings=128)
    trained_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), **SETTINGS) as llm:
        yield llm


def prompts(count: int, length: int = 20) -> list[list[int]]:
    return [
        [(7 * number + 11 * place) % 390 + 5 for place in range(length + number)]
        for number in range(count)
    ]


def test_two_engines_answer_as_one(checkpoint: Path, alone: LLM) -> None:
    """Greedy, sampled without a seed, and with a grammar: the same answers, from both; n of a request are in one."""
    params = [
        LONG,
        SAMPLED,
        SamplingParams(temperature=0, max_tokens=8, structured_output={"choice": ["yes", "no"]}),
    ]
    given = [params[number % 3] for number in range(9)]
    with LLM(str(checkpoint), **SETTINGS) as one:
        expected = one.generate(prompts(9), given)
    registry = prometheus.CollectorRegistry()
    with LLM(str(checkpoint), **TWO, on_step=PrometheusExporter("two", registry)) as llm:
        found = llm.generate(prompts(9), given)
        assert [output.outputs for output in found] == [output.outputs for output in expected]
        each = [replica.engine.stats().counters.sampled_tokens for replica in llm.replicas.each]
        assert min(each) > 0.3 * sum(each)
        for number, tokens in enumerate(each):
            labels = {"model_name": "two", "engine": str(number)}
            assert registry.get_sample_value("opgraft:generation_tokens_total", labels) == tokens
        stats = llm.stats()
        assert stats.counters.sampled_tokens == sum(each)
        assert (stats.running, stats.blocks_used, stats.num_blocks) == (0, 0, 320)
        assert llm.explain().to_dict()
        assert "2 replicas" in llm.capacity()
        with pytest.raises(RequestError, match="has no tokens"):
            llm.generate([[]])
        assert not any(replica.engine.has_work for replica in llm.replicas.each)


async def ended(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    *_, output = [each async for each in stream]
    return output


async def last(
    llm: AsyncLLM, prompt: list[int], params: SamplingParams = LONG, **options: Any
) -> RequestOutput:
    return await ended(llm.generate(prompt, params, **options))


def use(checkpoint: Path, settings: dict[str, Any], body: Any) -> None:
    async def main() -> None:
        async with AsyncLLM(str(checkpoint), **settings) as llm:
            await asyncio.wait_for(body(llm), PATIENCE)

    asyncio.run(main())


def hits(llm: AsyncLLM) -> list[int]:
    return [replica.engine.stats().counters.prefix_hits for replica in llm.replicas.each]


def test_turns_of_a_session_go_to_one_engine(checkpoint: Path) -> None:
    """Each turn finds the beginning of its chat in the cache, and sessions are spread over the engines."""

    async def chat(llm: AsyncLLM) -> None:
        chats = prompts(4, 40)
        for turn in range(3):
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            answers = await asyncio.gather(
                *(last(llm, each, params, cache_salt="a") for each in chats)
            )
            chats = [
                each + answer.outputs[0].token_ids
                for each, answer in zip(chats, answers, strict=True)
            ]
            if turn:
                assert sum(hits(llm)) >= turn * 4 * 32
        assert all(hits(llm))

    use(checkpoint, TWO, chat)


def test_aborting_and_leaving(checkpoint: Path) -> None:
    """A request is aborted wherever it is; an id is unique over the engines; who leaves costs nothing any more."""

    async def body(llm: AsyncLLM) -> None:
        async with aclosing(llm.generate([5, 6], LONG, request_id="a")) as stream:
            await anext(stream)
            with pytest.raises(RequestError, match="one of that id runs"):
                await last(llm, [5], request_id="a")
            await llm.abort("a")
            assert [output.outputs[0].finish_reason async for output in stream][-1] == "abort"
        with pytest.raises(RequestError, match="'a' cannot be aborted"):
            await llm.abort("a")
        async with aclosing(llm.generate([5, 6], LONG)) as stream:
            await anext(stream)
        while llm.stats().blocks_used:
            await asyncio.sleep(0.01)

    use(checkpoint, TWO, body)


def kill(replica: Replica) -> None:
    (worker,) = replica.engine.core.executor.workers.links
    assert isinstance(worker, LocalProcess)
    os.kill(worker.process.pid, signal.SIGKILL)


def holder(llm: AsyncLLM, name: str) -> Replica:
    (found,) = [each for each in llm.replicas.each if name in each.requests]
    return found


def test_requests_of_a_lost_engine_move(checkpoint: Path, alone: LLM) -> None:
    """Those that were streamed go on where they were, with the same tokens; then one engine serves, then none."""
    given = prompts(6)
    params = [LONG, SamplingParams(max_tokens=60, ignore_eos=True, seed=5, n=2), LONG] * 2
    expected = alone.generate(given, params)
    asked = list(zip(given, params, strict=True))

    async def body(llm: AsyncLLM) -> None:
        await llm.warm_up()
        streams = [
            llm.generate(prompt, each, request_id=str(i)) for i, (prompt, each) in enumerate(asked)
        ]
        first = await asyncio.gather(
            *map(anext, streams)
        )  # at once: one by one, the first might end meanwhile
        victim = max(llm.replicas.each, key=lambda each: len(each.requests))
        kill(victim)
        for stream, begun, wanted in zip(streams, first, expected, strict=True):
            seen = begun
            async for output in stream:
                for before, now in zip(seen.outputs, output.outputs, strict=True):
                    assert now.token_ids[: len(before.token_ids)] == before.token_ids
                seen = output
            assert [answer.token_ids for answer in seen.outputs] == [
                answer.token_ids for answer in wanted.outputs
            ]
            assert [answer.text for answer in seen.outputs] == [
                answer.text for answer in wanted.outputs
            ]
        assert sorted(llm.replicas.states()) == ["lost", "ready"]
        await llm.check_health()
        assert (await last(llm, given[0])).outputs[0].token_ids == expected[0].outputs[0].token_ids
        (left,) = [each for each in llm.replicas.each if each is not victim]
        stream = llm.generate(given[0], LONG)
        await anext(stream)
        kill(left)
        output = await ended(stream)
        assert output.outputs[0].finish_reason == "error"
        assert "was lost while it computed" in str(output.outputs[0].error)
        with pytest.raises(EngineError, match="2 of 2 replicas are lost"):
            await llm.check_health()
        with pytest.raises(EngineError, match="ended"):
            await last(llm, given[0])

    use(checkpoint, {**APART, "parallel.on_replica_loss": "move"}, body)


def test_requests_of_a_lost_engine_fail(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They fail, those of the other engine go on; it starts again once, and then is missing, as health and log say."""

    async def body(llm: AsyncLLM) -> None:
        streams = [
            llm.generate(prompt, LONG, request_id=str(i)) for i, prompt in enumerate(prompts(2))
        ]
        for stream in streams:
            await anext(stream)
        assert holder(llm, "0") is not holder(llm, "1")
        victim = holder(llm, "1")
        kill(victim)
        ends = [(await ended(stream)).outputs[0] for stream in streams]
        assert [end.finish_reason for end in ends] == ["length", "error"]
        while llm.replicas.states() != ["ready", "ready"]:
            await llm.check_health()
            await asyncio.sleep(0.05)
        found = await asyncio.gather(*(last(llm, prompt) for prompt in prompts(2)))
        assert found[0].outputs[0].token_ids == ends[0].token_ids
        kill(victim)
        while victim.state != "lost":
            await asyncio.sleep(0.01)
        with pytest.raises(EngineError, match="1 of 2 replicas"):
            await llm.check_health()
        assert f"replica {victim.number} is lost: 1 of 2 are ready" in caplog.messages

    use(checkpoint, {**APART, "parallel.least_replicas": 2, "parallel.restart_workers": 1}, body)


def test_a_replica_is_lost_while_another_starts(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is told of the loss counts the one that starts as not ready, and asks it for nothing that it has not yet."""
    config, made = engine_config(str(checkpoint), None, SETTINGS), threading.Event()

    def make() -> TextEngine:
        made.wait(PATIENCE)
        return TextEngine(config)

    replicas = Replicas(config)
    try:
        replicas.each.append(Replica(1, make))
        assert replicas.states() == ["ready", "starting"]
        replicas.forget_cache(replicas.each[0], "planted")
        assert "replica 0 is lost: 0 of 2 are ready" in caplog.messages
        made.set()
        replicas.each[1].wait()
        assert replicas.states() == ["ready", "ready"]
    finally:
        made.set()
        replicas.shutdown()
