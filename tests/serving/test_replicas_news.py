"""News of requests behind several engines: their ends are told and counted once, also where an engine is lost."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from opgraft import SamplingParams
from opgraft.engine.request import Request
from opgraft.errors import EngineError, RequestError
from opgraft.serving.engine_thread import NewsReader, QueuedReader
from opgraft.serving.llm import LLM
from opgraft.serving.open_request import OpenRequest
from opgraft.serving.replicas import Replica
from serving.test_replicas import TWO
from support.random_decoders import written

SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("news") / "llama"
    written("Llama", folder, vocab_size=400, max_position_embeddings=128)
    return folder


@pytest.fixture
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), **TWO, **{"parallel.on_replica_loss": "move"}) as llm:
        yield llm


class Gone(NewsReader):
    """A reader that has left."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.left = True

    def put(self, output: Any) -> bool:
        return False

    def fail(self, error: BaseException) -> None:
        raise AssertionError("nobody reads")


def broken(*_: object) -> None:
    raise OSError("broken")


def prepared(llm: LLM, *prompts: list[int]) -> list[OpenRequest]:
    prepare = llm.engine.inputs.prepare
    return [prepare(f"request {number}", each, SHORT) for number, each in enumerate(prompts)]


def expect_idle(llm: LLM) -> None:
    assert not any(replica.engine.has_work for replica in llm.replicas.each)
    for replica in llm.replicas.each:
        replica.forget_ended()
        assert not replica.requests


def test_what_is_submitted_at_once_is_computed_at_once(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that come during a step of both engines are all in the next one."""
    submitted, steps = threading.Event(), Counter[int]()

    def counted(number: int, step: Callable[[], Any]) -> Any:
        steps[number] += 1
        submitted.wait(30)
        return step()

    for each in llm.replicas.each:
        monkeypatch.setattr(
            each.engine.core, "step", partial(counted, each.number, each.engine.core.step)
        )
    requests = prepared(llm, *([5, 6, number + 7] for number in range(12)))
    queue: SimpleQueue[Any] = SimpleQueue()
    openings = []
    for request in requests:
        reader = QueuedReader(request.output.request_id, queue, grows=False)
        openings += llm.replicas.open([(reader, request)])
    submitted.set()
    for opening in openings:
        opening.result()
    for _ in requests:
        queue.get()
    assert len(steps) == 2
    assert max(steps.values()) <= 1 + SHORT.most_tokens
    expect_idle(llm)


def test_prompts_of_a_call_share_their_first_step(llm: LLM) -> None:
    """However long the threads take to wake up, each engine computes its prompts side by side."""
    llm.generate([[5, 6, number + 7] for number in range(12)], SHORT)
    for replica in llm.replicas.each:
        assert replica.engine.stats().counters.steps == SHORT.most_tokens


def test_what_an_engine_refuses_is_raised(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """If an executor refuses a request, the call raises the reason, and no request of the call is left."""

    def expect_servable(request: Request) -> None:
        if request.prompt[0] == 6:
            raise RequestError("it begins with 6")

    for each in llm.replicas.each:
        monkeypatch.setattr(each.engine.core.executor, "expect_servable", expect_servable)
    with pytest.raises(RequestError, match="begins with 6"):
        llm.generate([[5, 6], [6, 5]], SHORT)
    expect_idle(llm)
    (output,) = llm.generate([[5, 6]], SHORT)
    assert output.outputs[0].finish_reason == "length"


def test_a_request_that_nobody_reads_is_forgotten(llm: LLM) -> None:
    """If the reader leaves before the request is opened, the id is free again, and the request is no load."""
    (request,) = prepared(llm, [5, 6])
    (opening,) = llm.replicas.open([(Gone(request.output.request_id), request)])
    opening.result()
    assert [replica.load() for replica in llm.replicas.each] == [0, 0]
    expect_idle(llm)


def holder(llm: LLM) -> Replica:
    (found,) = [each for each in llm.replicas.each if each.requests]
    return found


def test_a_request_that_moves_is_counted_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends in the other engine, and the lost one counts no end of it."""
    for each in llm.replicas.each:
        monkeypatch.setattr(each.engine.core, "step", list)  # nothing is computed yet
    queue: SimpleQueue[Any] = SimpleQueue()
    (request,) = prepared(llm, [5, 6])
    reader = QueuedReader(request.output.request_id, queue, grows=False)
    (opening,) = llm.replicas.open([(reader, request)])
    opening.result()
    lost = holder(llm)
    (other,) = [each for each in llm.replicas.each if each is not lost]
    monkeypatch.undo()
    monkeypatch.setattr(lost.engine.core, "step", broken)
    assert queue.get()().outputs[0].finish_reason == "length"
    counted, elsewhere = (each.engine.stats().counters.finished for each in (lost, other))
    assert {**counted, "length": 0} == dict.fromkeys(counted, 0)
    assert counted["length"] + elsewhere["length"] == 1


def test_a_loss_that_cannot_be_handled_ends_the_call(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error while an engine's requests are given away reaches who reads them."""
    monkeypatch.setattr(llm.replicas, "forget_cache", broken)
    for each in llm.replicas.each:
        monkeypatch.setattr(each.engine.core, "step", broken)
    with pytest.raises(EngineError, match="broken"):
        llm.generate([[5, 6]], SHORT)
