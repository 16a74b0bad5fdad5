"""``LLM`` in threads, in forked processes, and in the thread of its own engine: nothing waits for ever."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from opgraft import SamplingParams
from opgraft.cli.answer import expect_answers
from opgraft.engine.core import EngineCore
from opgraft.errors import EngineError, RequestError
from opgraft.serving.embedding_engine import VectorRequest
from opgraft.serving.engine_thread import QueuedReader
from opgraft.serving.llm import LLM, Interrupted
from opgraft.serving.open_request import OpenRequest
from opgraft.serving.outputs import RequestOutput
from support.engines import expect_empty
from support.small_models import open_llm, write_model

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
PROMPT = [9, 8, 7]


@pytest.fixture(scope="module")
def folder(trained: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("threads") / "model", trained)


@pytest.fixture
def llm(folder: Path) -> LLM:
    return open_llm(folder)


def prepared(llm: LLM, name: str, params: SamplingParams = LONG) -> OpenRequest:
    return llm.engine.inputs.prepare(name, PROMPT, params)


def in_thread(function: Callable[[], Any]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def expect_goes_on(llm: LLM) -> None:
    assert len(llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids) == 4
    assert not llm.engine.has_work
    expect_empty(llm.engine.core)


def test_a_call_within_the_reading_of_another(llm: LLM) -> None:
    """The inner call is refused with the remedy, and the outer one ends as if it had not been made."""
    outer = prepared(llm, "outer")
    for _ in llm.answers([outer], grows=True):
        with pytest.raises(RequestError, match="read the iterator to its end, or close it"):
            llm.generate(PROMPT, GREEDY)
    assert len(outer.output.outputs[0].token_ids) == 40
    expect_goes_on(llm)


def test_two_iterators_at_a_time(llm: LLM) -> None:
    """The second is refused. The first is closed with it, and later calls are answered."""
    first, second = (llm.answers([prepared(llm, name)], grows=True) for name in "ab")
    with pytest.raises(RequestError, match="has an iterator of answers"):
        list(zip(first, second, strict=True))
    first.close()
    expect_goes_on(llm)


def test_an_iterator_is_closed_in_another_thread(llm: LLM) -> None:
    """The request is aborted, and calls of every thread are answered."""
    left = prepared(llm, "left")
    news = llm.answers([left], grows=True)
    next(news)
    in_thread(news.close)
    assert left.output.outputs[0].finish_reason == "abort"
    in_thread(lambda: llm.generate(PROMPT, GREEDY))
    expect_goes_on(llm)


def test_an_interrupt_of_the_reader_is_the_readers(llm: LLM) -> None:
    """Between two answers Ctrl-C does what it does in any other code; the iterator goes on."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    request = prepared(llm, "a")
    news = llm.answers([request], grows=True)
    try:
        next(news)
        with pytest.raises(KeyboardInterrupt) as caught:
            signal.raise_signal(signal.SIGINT)
        assert not isinstance(caught.value, Interrupted)
        list(news)
    finally:
        signal.signal(signal.SIGINT, former)
    assert len(request.output.outputs[0].token_ids) == 40


def test_on_step_asks_the_model(folder: Path) -> None:
    """The engine's thread gets an explanation, and is refused answers, instead of waiting for itself."""
    found: list[Any] = []

    def on_step(*_: object) -> None:
        found.append(llm.explain())
        with pytest.raises(RequestError, match="which this thread is to compute") as caught:
            llm.generate(PROMPT, GREEDY)
        found.append(caught)

    llm = open_llm(folder, on_step=on_step)
    expect_goes_on(llm)
    assert found[0].rows
    assert len(found) == 8


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_kernel_that_interrupts_fails_a_step(llm: LLM, error: type[BaseException]) -> None:
    """In the engine's thread an interrupt is no signal: the step fails, and the model goes on."""
    model = llm.engine.core.executor.worker.runner.model  # type: ignore[attr-defined]
    forward = model.forward

    def broken(*_: object, **__: object) -> None:
        model.forward = forward
        raise error("kernel trouble")

    model.forward = broken
    (output,) = llm.generate(PROMPT, GREEDY)
    assert output.outputs[0].finish_reason == "error"
    assert "kernel trouble" in str(output.outputs[0].error)
    expect_goes_on(llm)


def test_a_model_goes_on_after_a_second_interrupt(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second Ctrl-C leaves a step in the middle; the next prompts are answered, and nothing is held of the others."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    run = llm.engine.core._run
    going, left = threading.Event(), threading.Event()
    was_left: list[bool] = []

    def slowly() -> Any:
        going.set()
        was_left.append(left.wait(60))
        return run()

    def interrupt_twice() -> None:
        going.wait()
        for is_ours in (True, False):
            # The engine's handler notes the first interrupt, and sets the former one back. A signal
            # that comes before that would be lost.
            while (signal.getsignal(signal.SIGINT) is signal.default_int_handler) is is_ours:
                if left.wait(0.01):
                    return
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt_twice)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(llm.engine.core, "_run", slowly)
            thread.start()
            with pytest.raises(KeyboardInterrupt) as caught:
                llm.generate([PROMPT] * 9, LONG)
            left.set()
        assert not isinstance(caught.value, Interrupted)
    finally:
        left.set()
        thread.join()
        signal.signal(signal.SIGINT, former)
    expect_goes_on(llm)
    # Else the caller has waited for the step.
    assert was_left
    assert all(was_left)


def test_an_interrupt_ends_a_with_block(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that hangs keeps the block from ending for two seconds at most."""
    hung = threading.Event()
    monkeypatch.setattr(EngineCore, "_run", lambda core: hung.wait() and None)
    reader: threading.Thread | None = None

    def read(llm: LLM) -> None:
        with suppress(EngineError):  # the step has no result
            list(llm.answers([prepared(llm, "a")]))

    def interrupted() -> None:
        nonlocal reader
        with open_llm(folder) as llm:
            reader = threading.Thread(target=read, args=(llm,), daemon=True)
            reader.start()
            while not llm.engine.has_work:
                time.sleep(0.01)
            raise KeyboardInterrupt

    waiting = threading.Timer(60, hung.set)
    waiting.start()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not hung.is_set()
    hung.set()
    waiting.cancel()
    assert reader is not None
    reader.join(60)


def test_an_interrupt_counts_texts_with_vectors() -> None:
    """A text that was aborted has ended without a vector, and is not counted as answered."""
    done, aborted = (
        VectorRequest(RequestOutput(name, None, [5], []), {}, name=name) for name in "ab"
    )
    done.output.finished = True
    aborted.abort()
    assert aborted.output.finished
    assert "1 of 2 prompts were answered" in str(Interrupted([done, aborted]))


def test_a_forked_child_is_told(llm: LLM) -> None:
    """The child has no thread of the engine: calls raise, and an end of the model does nothing."""
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate(PROMPT, GREEDY),
        llm.explain,
        lambda: llm.replicas.abort("a"),
    ]
    child = os.fork()
    if child == 0:
        wrong = 1
        try:
            signal.alarm(30)
            for call in calls:
                with pytest.raises(EngineError, match=r"process that forked .*: make a new one"):
                    call()
            llm.shutdown()
            wrong = 0
        finally:
            os._exit(wrong)
    _, status = os.waitpid(child, 0)
    assert status == 0
    expect_goes_on(llm)


def test_one_refused_request_of_a_call(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is computed for the others, those before it and those behind it."""

    def expect_servable(request: Any) -> None:
        if request.request_id.startswith("b"):
            raise RequestError("cannot be served")

    monkeypatch.setattr(llm.executor, "expect_servable", expect_servable)
    requests = [prepared(llm, name) for name in "abc"]
    steps = llm.stats().counters.steps
    with pytest.raises(RequestError, match="cannot be served"):
        list(llm.answers(requests))
    assert llm.stats().counters.steps == steps
    assert [requests[index].output.finished for index in (0, 2)] == [True, True]
    expect_goes_on(llm)


def test_a_request_that_was_left_is_aborted(llm: LLM) -> None:
    """A reader may leave before an engine begins with the request, as while it moves from a lost one."""
    request = prepared(llm, "a")
    reader = QueuedReader("a", SimpleQueue(), grows=False)
    reader.left = True
    (opened,) = llm.replicas.open([(reader, request)])
    opened.result(60)
    assert request.output.finished
    assert request.output.outputs[0].finish_reason == "abort"


def test_a_router_that_raises(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller gets the error, also if the router is asked again in the thread of an engine."""
    two = {"parallel.data": 2, "parallel.executor": "in_process"}
    with open_llm(folder, **two) as llm:

        def broken(*_: object) -> None:
            raise ZeroDivisionError("router trouble")

        def refuse(*_: object) -> None:
            monkeypatch.setattr(llm.replicas, "_number", broken)
            raise EngineError("lost")

        with monkeypatch.context() as patched:
            patched.setattr(llm.replicas.router, "route", broken)
            with pytest.raises(ZeroDivisionError, match="router trouble"):
                llm.generate(PROMPT, GREEDY)
        for replica in llm.replicas.each:
            monkeypatch.setattr(replica.engine, "submit", refuse)
        with pytest.raises(ZeroDivisionError, match="router trouble"):
            llm.generate(PROMPT, GREEDY)


def test_the_failure_of_any_replica_is_raised(folder: Path) -> None:
    """A kernel's error in the second engine is shown as one in the first."""
    two = {"parallel.data": 2, "parallel.executor": "in_process"}
    with open_llm(folder, **two) as llm:
        outputs = llm.generate(PROMPT, GREEDY)
        outputs[0].outputs[0].finish_reason = "error"
        second = llm.replicas.each[1].engine
        second.core.step_failure = ZeroDivisionError("kernel trouble")  # type: ignore[attr-defined]
        with pytest.raises(ZeroDivisionError, match="kernel trouble"):
            expect_answers(llm, outputs)
