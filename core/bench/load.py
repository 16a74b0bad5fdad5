"""Loads: how fast requests are sent, and the run of one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from opgraft.bench.client import Client, Outcome
from opgraft.bench.prompts import Prompt, arrivals

_Send: TypeAlias = Callable[[Prompt, float], Awaitable[Outcome]]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass(frozen=True)
class Load:
    """Pace at which requests are sent: so many in a second, or the next whenever one of so many has ended.

    Attributes:
        rate: requests per second, whether or not those before have ended; None where ``concurrency`` counts.
        concurrency: requests at a time.
        poisson: whether the times between requests are random, as of independent users, or all the same.
        seed: of these times.
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
        model: name of it.
        chat: whether chats are asked for, or completions.
        max_tokens: of an answer, unless its prompt says otherwise.
        fields: that are sent besides.
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
    ended: Callable[[int], None] = lambda more: None,
) -> list[Outcome]:
    """Send a request for each prompt, and return what became of them, in their order.

    Under a rate, a request's time begins when it is due, so that a client or server that falls behind does not hide it.

    Args:
        client: of the server.
        question: common part of the requests.
        prompts: the others.
        load: when each is sent.
        ended: called with the number of requests that have ended since the last call.
    """

    async def send(prompt: Prompt, due: float) -> Outcome:
        outcome = await client.send(question.path, question.body(prompt), due)
        ended(1)
        return outcome

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
