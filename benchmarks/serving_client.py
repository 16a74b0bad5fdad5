"""A client of a server with OpenAI's interface, which notes when each part of an answer came."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

_SHOWN = 300
"""Characters of a server's answer that an error quotes."""


@dataclass
class Outcome:
    """One request and what became of it. Times are readings of ``time.perf_counter()``.

    Attributes:
        due: when the request should be sent.
        ended: when the answer, or the failure, was complete.
        arrivals: when parts of the text came, one or more tokens each.
        prompt_tokens: the server's count.
        output_tokens: the server's count, or the number of ``arrivals`` if the server does not count.
        error: ``connection``, ``timeout``, ``incomplete``, ``stream`` or the status of the answer;
            None if the request was answered.
        message: the server's or the connection's words about the error.
    """

    due: float
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None
    message: str = ""

    @property
    def seconds(self) -> float:
        return self.ended - self.due


class RequestFailedError(Exception):
    """A request failed; reports count failures by kind."""

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(kind)
        self.kind = kind
        self.message = message


class Client:
    """Connections to a server; an asynchronous context manager.

    Args:
        url: the server's, without ``/v1``.
        seconds: the longest time that a request may take.
    """

    def __init__(self, url: str, seconds: float = 600) -> None:
        self.url = url
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(seconds), connector=aiohttp.TCPConnector(limit=0)
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def model(self) -> str:
        """Return the name of the first model that the server lists."""
        async with self._session.get(f"{self.url}/v1/models", raise_for_status=True) as response:
            listed = await response.json()
        return str(listed["data"][0]["id"])

    async def send(self, path: str, body: Mapping[str, Any], due: float) -> Outcome:
        """Send a request for a stream, and read the stream to its end.

        A failure is not raised: the outcome names it.
        """
        outcome = Outcome(due)
        try:
            async with self._session.post(f"{self.url}{path}", json=body) as response:
                if response.status != 200:
                    text = await response.text(errors="replace")
                    raise RequestFailedError(str(response.status), _message(text))
                await _read(response, outcome)
        except RequestFailedError as failure:
            outcome.error, outcome.message = failure.kind, failure.message
        except asyncio.TimeoutError:
            outcome.error = "timeout"
        except (aiohttp.ClientError, OSError) as error:
            outcome.error, outcome.message = "connection", str(error)
        outcome.ended = time.perf_counter()
        outcome.output_tokens = outcome.output_tokens or len(outcome.arrivals)
        return outcome


async def _read(response: aiohttp.ClientResponse, outcome: Outcome) -> None:
    """Note the parts and the counts of a stream in an outcome."""
    async for data in _events(response):
        if data == b"[DONE]":
            return
        try:
            chunk = json.loads(data)
            failed = "error" in chunk
            counts = chunk.get("usage") or {}
            has_text = any(map(_has_text, chunk.get("choices") or ()))
        except (ValueError, AttributeError, TypeError) as error:
            raise RequestFailedError("stream") from error
        if failed:
            raise RequestFailedError("stream", _message(data.decode(errors="replace")))
        if has_text:
            outcome.arrivals.append(time.perf_counter())
        outcome.prompt_tokens = counts.get("prompt_tokens", outcome.prompt_tokens)
        outcome.output_tokens = counts.get("completion_tokens", outcome.output_tokens)
    raise RequestFailedError("incomplete")


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the data of server-sent events."""
    rest = b""
    async for part in response.content.iter_any():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _message(answer: str) -> str:
    """Return the message of an error in OpenAI's form, or the text itself if it has another form."""
    try:
        return str(json.loads(answer)["error"]["message"])[:_SHOWN]
    except (ValueError, LookupError, TypeError):
        return answer.strip()[:_SHOWN]


def _has_text(choice: Mapping[str, Any]) -> bool:
    """Return True if a choice of a chunk holds some of the answer."""
    delta = choice.get("delta") or {}
    return bool(
        choice.get("text")
        or delta.get("content")
        or delta.get("reasoning_content")
        or delta.get("tool_calls")
    )
