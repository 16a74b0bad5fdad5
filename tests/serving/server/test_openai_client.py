"""The official client against a real process that serves the real language model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest
from support.servers import Server, serving

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Server]:
    with serving(
        "smollm2", "--dtype", "float32", "--load.progress", "false", "--cache.num_blocks", "256"
    ) as running:
        yield running


def test_start_up_tells_what_is_served(smollm2: Server) -> None:
    """Model, platform, kernels, cache in tokens, and the URL are printed, a line each."""
    assert [line.split()[0] for line in smollm2.shown] == [
        "model",
        "platform",
        "kernels",
        "cache",
        "url",
    ]
    assert "8,192 tokens" in smollm2.shown[3]


def test_models(smollm2: Server) -> None:
    """The model is listed and shown; another one is not found."""
    (model,) = smollm2.openai.models.list().data
    assert model.id == "smollm2"
    assert smollm2.openai.models.retrieve("smollm2").id == "smollm2"
    with pytest.raises(openai.NotFoundError, match="is not served here: ask for 'smollm2'"):
        smollm2.openai.models.retrieve("gpt-5")


def test_a_chat(smollm2: Server) -> None:
    """A chat is answered, whole and as a stream alike, with its usage."""
    client = smollm2.openai
    whole = client.chat.completions.create(
        model="smollm2", messages=QUESTION, temperature=0, max_tokens=12
    )
    assert "Paris" in whole.choices[0].message.content
    assert whole.choices[0].finish_reason in ("stop", "length")
    stream = client.chat.completions.create(
        model="smollm2",
        messages=QUESTION,
        temperature=0,
        max_completion_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert len(chunks) > 3, "it comes in parts"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.choices == []
    assert last.usage.total_tokens == whole.usage.total_tokens
    assert last.usage.prompt_tokens_details.cached_tokens > 0


def test_a_completion(smollm2: Server) -> None:
    """A prompt goes on, whole and as a stream alike, echoed if that is asked for."""
    client = smollm2.openai
    given = {
        "model": "smollm2",
        "prompt": "The capital of France is",
        "temperature": 0,
        "max_tokens": 6,
    }
    whole = client.completions.create(**given)
    assert "Paris" in whole.choices[0].text
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 6)
    assert "".join(
        chunk.choices[0].text for chunk in client.completions.create(**given, stream=True)
    ) == (whole.choices[0].text)
    echoed = client.completions.create(**given, echo=True)
    assert echoed.choices[0].text == given["prompt"] + whole.choices[0].text


def test_many_at_once_from_the_asynchronous_client(smollm2: Server) -> None:
    """Streams of several requests at once have the texts that each has alone."""
    prompts = [f"{number} and {number} is" for number in range(4)]
    given = {"model": "smollm2", "temperature": 0, "max_tokens": 5}

    async def streamed(client: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(prompt=prompt, stream=True, **given)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_at_once() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{smollm2.url}/v1", api_key="none", max_retries=0
        ) as client:
            return await asyncio.gather(*(streamed(client, prompt) for prompt in prompts))

    alone = smollm2.openai.completions.create(prompt=prompts, **given)
    assert asyncio.run(all_at_once()) == [choice.text for choice in alone.choices]


def test_an_error_of_the_client_names_the_field(smollm2: Server) -> None:
    """A request that cannot be served is an error of the client's own class, with the field."""
    with pytest.raises(openai.BadRequestError) as raised:
        smollm2.openai.chat.completions.create(model="smollm2", messages=QUESTION, temperature=-1)
    assert raised.value.param == "temperature"
