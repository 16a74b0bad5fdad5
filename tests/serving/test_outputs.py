"""Answers that grow: a token costs the same however long the answer is, and what was read does not change."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
import tracemalloc
from collections.abc import Callable
from io import StringIO

import pytest
from opgraft.serving.detokenizer import Detokenizer
from opgraft.serving.engine_thread import AsyncNewsReader, Mailbox
from opgraft.serving.outputs import (
    CompletionOutput,
    GrowingOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from opgraft.serving.tokenizer import Tokenizer

LONG = 20_000


class Growing:
    """A request with one answer, to which tokens are added as the engine does."""

    def __init__(self, tokens: int = 0) -> None:
        self.written = StringIO()
        self.answer = GrowingOutput(0, lambda: self.written)
        self.answer.logprobs = []
        self.output = RequestOutput("a", "p", [1], [self.answer], metrics=RequestMetrics(0.0))
        for token in range(tokens):
            self.add(token)

    def add(self, token: int) -> None:
        self.written.write(f"{token}\r\n")
        self.answer.token_ids.append(token)
        assert self.answer.logprobs is not None
        self.answer.logprobs.append({token: Logprob(-1.0)})
        self.answer.cumulative_logprob = -float(token)


def expected(tokens: int) -> CompletionOutput:
    text = "".join(f"{token}\r\n" for token in range(tokens))
    logprobs = [{token: Logprob(-1.0)} for token in range(tokens)]
    return CompletionOutput(0, text, list(range(tokens)), 1.0 - tokens, logprobs)


def peak_bytes(function: Callable[[], object]) -> int:
    """Bytes that a call takes at its peak."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_deferred_snapshot_is_of_its_time() -> None:
    """It has what there was when it was deferred, whatever has come since, and is plain data."""
    growing = Growing(3)
    metrics = growing.output.metrics
    assert metrics is not None
    deferred = growing.output.deferred_snapshot()
    growing.add(3)
    metrics.last_token = 5.0
    growing.answer.finish_reason = "stop"
    growing.output.finished = True
    found = deferred()
    assert found.outputs == [expected(3)]
    assert (found.finished, found.metrics) == (False, RequestMetrics(0.0))
    assert growing.output.deferred_snapshot()().outputs == [
        dataclasses.replace(expected(4), finish_reason="stop")
    ]
    assert pickle.loads(pickle.dumps(found)) == found  # noqa: S301  # its own


def test_a_snapshot_that_was_read_stays() -> None:
    """Lists of a snapshot are its own: they neither grow with the answer nor change it."""
    growing = Growing(2)
    found = growing.output.deferred_snapshot()()
    growing.add(2)
    assert found.outputs == [expected(2)]
    found.outputs[0].token_ids.clear()
    assert growing.output.snapshot().outputs == [expected(3)]


@pytest.mark.parametrize("tokens", [1, LONG])
def test_the_engine_copies_nothing_for_a_token(tokens: int) -> None:
    """What is left for a reader takes as little memory for a long answer as for a short one."""
    growing = Growing(tokens)
    assert peak_bytes(growing.output.deferred_snapshot) < 4096
    deferred = growing.output.deferred_snapshot()
    assert (peak_bytes(deferred) > 8 * LONG) == (tokens == LONG)


def test_text_is_put_together_when_it_is_read(smollm2: Tokenizer) -> None:
    """A token of a long text takes no memory for the text before it."""
    detokenizer = Detokenizer(smollm2)
    (token,) = smollm2.encode(" the")
    answer = GrowingOutput(0, lambda: detokenizer.written)
    for _ in range(LONG):
        detokenizer.add(token)
    assert answer.text == " the" * LONG
    detokenizer.add(token)
    assert peak_bytes(answer.deferred_snapshot) < 4096
    detokenizer.finish()
    assert answer.text == " the" * (LONG + 1)


def test_only_what_is_fetched_is_put_together() -> None:
    """Of news that pile up before a reader comes, the newest alone are made."""
    made = []

    def news(number: int) -> Callable[[], RequestOutput]:
        def make() -> RequestOutput:
            made.append(number)
            return RequestOutput("a", None, [number], [])

        return make

    async def read() -> None:
        mailbox = Mailbox(asyncio.get_running_loop())
        stream = AsyncNewsReader("a", mailbox)
        for number in range(3):
            mailbox.put(stream, news(number))
        await asyncio.sleep(0)
        mailbox.put(stream, news(3))
        await asyncio.sleep(0)
        assert made == []
        assert (await stream.next()).prompt_token_ids == [3]
        assert made == [3]

    asyncio.run(read())
