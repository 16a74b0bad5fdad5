"""The pace at which a load test sends its requests, and the sending."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from serving_client import Client, Outcome
from serving_prompts import Prompt, arrivals

_Send: TypeAlias = Callable[[Prompt, float], Awaitable[Outcome]]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass(frozen=True)
class Load:
    """Pace of requests: a rate, or a number of requests at a time.

    Attributes:
        rate: requests per second, whether or not earlier ones have ended; None to use ``concurrency``.
        concurrency: requests at a time; the next is sent when one has ended.
        poisson: whether the times between requests are random, as of independent users, or equal.
        seed: seed of random times.
    """

    rate: float | None = None
    concurrency: int = 1
    poisson: bool = True
    seed: int = 0

    @property
    def label(self) -> str:
        return f"{self.concurrency} at a time" if self.rate is None else f"{self.rate:g} requests/s"


@dataclass(frozen=True)
class Question:
    """Common part of all requests of a load test.

    Attributes:
        model: the model's name.
        chat: whether to ask for chats or for completions.
        max_tokens: longest answer, unless the prompt has its own.
        fields: further fields of a request.
    """

    model: str
    chat: bool
    max_tokens: int
    fields: Mapping[str, Any]

    @property
    def path(self) -> str:
        return CHAT if self.chat else COMPLETIONS

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """Return a request for a stream."""
        return {
            "model": self.model,
            **prompt.body(self.chat),
            "max_tokens": prompt.max_tokens or self.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields,
        }


async def run(
    client: Client,
    question: Question,
    prompts: Sequence[Prompt],
    load: Load,
) -> list[Outcome]:
    """Send a request for each prompt, and return the outcomes in the order of the prompts.

    Under a rate, a request's time begins when it is due, so that a slow client or server shows.
    """

    async def send(prompt: Prompt, due: float) -> Outcome:
        return await client.send(question.path, question.body(prompt), due)

    if load.rate is not None:
        return await _at_rate(
            send, prompts, arrivals(len(prompts), load.rate, load.poisson, load.seed)
        )
    return await _at_a_time(send, prompts, load.concurrency)


async def _at_rate(send: _Send, prompts: Sequence[Prompt], times: Sequence[float]) -> list[Outcome]:
    start = time.perf_counter()

    async def one(prompt: Prompt, due: float) -> Outcome:
        await asyncio.sleep(due - time.perf_counter())
        return await send(prompt, due)

    return await asyncio.gather(
        *(one(prompt, start + at) for prompt, at in zip(prompts, times, strict=True))
    )


async def _at_a_time(send: _Send, prompts: Sequence[Prompt], concurrency: int) -> list[Outcome]:
    waiting = iter(enumerate(prompts))
    outcomes: dict[int, Outcome] = {}

    async def worker() -> None:
        for number, prompt in waiting:
            outcomes[number] = await send(prompt, time.perf_counter())

    await asyncio.gather(*(worker() for _ in range(min(concurrency, len(prompts)))))
    return [outcomes[number] for number in range(len(prompts))]
