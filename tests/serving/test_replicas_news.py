"""News of requests behind several engines: their ends are told and counted once, also where an engine is lost."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from opgraft import SamplingParams
from opgraft.engine.request import Request
from opgraft.errors import EngineError, RequestError
from opgraft.serving.engine_thread import Reader
from opgraft.serving.llm import LLM
from opgraft.serving.replica import Replica
from opgraft.serving.replicated_engine import ReplicatedEngine
from random_decoders import written
from serving.test_replicas import TWO

SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("news") / "llama"
    written("Llama", folder, vocab_size=400, max_position_embeddings=128)
    return folder


@pytest.fixture
def engine(checkpoint: Path) -> Iterator[ReplicatedEngine]:
    with LLM(str(checkpoint), **TWO, **{"parallel.on_replica_loss": "move"}) as llm:
        assert isinstance(llm.engine, ReplicatedEngine)
        yield llm.engine


class Gone(Reader):
    """A reader that has left."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.left = True

    def put(self, news: Any) -> bool:
        return False


def broken(*_: object) -> None:
    raise OSError("broken")


def holder(engine: ReplicatedEngine, name: str) -> Replica:
    (found,) = [each for each in engine.replicas.each if name in each.requests]
    return found


def test_the_end_of_a_stream_is_yielded_however_late_it_is_read(engine: ReplicatedEngine) -> None:
    """An engine that has computed all while the reader did something else has its last news read, and is done."""
    output = engine.add("a", [5, 6], SHORT)
    while not output.finished:
        time.sleep(0.01)
    *_, last = engine.stream("a")
    assert last.finished
    assert last.outputs[0].token_ids == output.outputs[0].token_ids
    assert not engine.has_work
    output = engine.add("b", [5, 6], SHORT)
    while not output.finished:
        time.sleep(0.01)
    assert engine.abort("b") is output
    assert not engine.has_work


def test_what_is_submitted_at_once_is_computed_at_once(
    engine: ReplicatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that come during a step of both engines are all in the next one."""
    submitted, steps = threading.Event(), Counter[int]()

    def counted(number: int, step: Callable[[], Any]) -> Any:
        steps[number] += 1
        if not submitted.wait(30):  # one of them would wait for this step
            submitted.set()
        return step()

    for each in engine.replicas.each:
        monkeypatch.setattr(
            each.engine.core, "step", partial(counted, each.number, each.engine.core.step)
        )
    for number in range(12):
        engine.add(str(number), [5, 6, number + 7], SHORT)
    submitted.set()
    ended = 0
    while engine.has_work:
        ended += sum(output.finished for output in engine.step())
    assert ended == 12
    assert len(steps) == 2
    assert max(steps.values()) <= 1 + SHORT.most_tokens


def test_what_an_engine_refuses_is_raised(
    engine: ReplicatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that an executor cannot have reach its workers fails the next step, and is no work any more."""

    def expect_servable(request: Request) -> None:
        if request.prompt[0] == 6:
            raise RequestError("it begins with 6")

    for each in engine.replicas.each:
        monkeypatch.setattr(each.engine.core.executor, "expect_servable", expect_servable)
    engine.add("a", [5, 6], SHORT)
    engine.add("b", [6, 5], SHORT)
    with pytest.raises(RequestError, match="begins with 6"):
        engine.step()
    *_, last = engine.stream("a")
    assert last.outputs[0].finish_reason == "length"
    assert not engine.has_work
    assert not any("b" in each.requests for each in engine.replicas.each)


def test_a_request_that_nobody_reads_is_forgotten(engine: ReplicatedEngine) -> None:
    """Its id is free again, and it is no load, where its reader leaves before it is opened."""
    prepared = engine.prepare("a", [5, 6], SHORT)
    replica = next(engine.replicas.choices(prepared))
    assert replica.open(Gone("a"), prepared).result() is False
    assert replica.load() == 0
    assert not replica.requests


def test_a_request_that_moves_is_counted_once(
    engine: ReplicatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends in the other engine, and the lost one counts no end of it."""
    for each in engine.replicas.each:
        monkeypatch.setattr(each.engine.core, "step", list)  # nothing is computed yet
    engine.add("a", [5, 6], SHORT)
    lost = holder(engine, "a")
    (other,) = [each for each in engine.replicas.each if each is not lost]
    monkeypatch.undo()
    monkeypatch.setattr(lost.engine.core, "step", broken)
    *_, last = engine.stream("a")
    assert last.outputs[0].finish_reason == "length"
    assert {**lost.engine.stats().counters.finished, "length": 0} == dict.fromkeys(
        lost.engine.stats().counters.finished, 0
    )
    assert (
        other.engine.stats().counters.finished["length"]
        + lost.engine.stats().counters.finished["length"]
        == 1
    )


def test_a_loss_that_cannot_be_handled_ends_the_streams(
    engine: ReplicatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error while an engine's requests are given away reaches who reads them."""
    for each in engine.replicas.each:
        monkeypatch.setattr(each.thread, "_on_loss", broken)
        monkeypatch.setattr(each.engine.core, "step", broken)
    engine.add("a", [5, 6], SHORT)
    with pytest.raises(EngineError, match="broken"):
        list(engine.stream("a"))
    assert not engine.has_work
