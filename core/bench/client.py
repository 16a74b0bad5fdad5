"""Requests to a server with OpenAI's interface, and when each part of their answers came."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from opgraft.errors import HTTPError, InputError

_SHOWN = 300
"""Characters of a foreign answer that an error quotes."""


@dataclass
class Outcome:
    """Course of a request; times are of ``time.perf_counter()``.

    Attributes:
        due: when it should be sent.
        ended: when its answer, or its failure, was complete.
        arrivals: when parts of the text came, one or more tokens each.
        prompt_tokens: as the server counted them.
        output_tokens: likewise; where it does not, the number of ``arrivals``.
        error: ``connection``, ``timeout``, ``incomplete``, ``stream``, or the status of the answer; None where it is
            none.
        message: of the server about it, or of the connection; empty where there is none.
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


class Broken(Exception):  # noqa: N818 - the outcome of a request, which no caller sees
    """A request has failed in a way that is counted by a name."""

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(kind)
        self.kind = kind
        self.message = message


class Client:
    """A connection to a server; an asynchronous context manager.

    Args:
        url: of the server, with or without ``/v1``.
        api_key: that is sent, if any.
        seconds: that a request may take.
    """

    def __init__(self, url: str, api_key: str | None = None, seconds: float = 600) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._session = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(seconds),
            connector=aiohttp.TCPConnector(limit=0),
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def model(self) -> str:
        """Return the name of the first model that is served.

        Raises:
            InputError: nothing answers at the URL, or nothing that has OpenAI's interface.
            HTTPError: the server refuses to tell.
        """
        try:
            async with self._session.get(f"{self.url}/v1/models") as response:
                text = await response.text(errors="replace")
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
            why = str(error) or type(error).__name__
            raise InputError(
                f"no server answers at {self.url} ({why}): start it, or check --url"
            ) from error
        if response.status != 200:
            raise HTTPError(
                response.status,
                f"{self.url}/v1/models answers with the status {response.status}: {text[:_SHOWN]}: "
                "check --url and --api-key-file, or name the model by --model",
            )
        try:
            return str(json.loads(text)["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise InputError(
                f"{self.url}/v1/models lists no model: check --url, or name the model by --model"
            ) from error

    async def send(self, path: str, body: Mapping[str, Any], due: float) -> Outcome:
        """Send a request whose answer is a stream, and read it to its end. What fails, is part of the outcome."""
        outcome = Outcome(due)
        try:
            async with self._session.post(f"{self.url}{path}", json=body) as response:
                if response.status != 200:
                    raise Broken(
                        str(response.status), _message(await response.text(errors="replace"))
                    )
                await _read(response, outcome)
        except Broken as failure:
            outcome.error, outcome.message = failure.kind, failure.message
        except asyncio.TimeoutError:
            outcome.error = "timeout"
        except (aiohttp.ClientError, OSError) as error:
            outcome.error, outcome.message = "connection", str(error)
        outcome.ended = time.perf_counter()
        outcome.output_tokens = outcome.output_tokens or len(outcome.arrivals)
        return outcome


async def _read(response: aiohttp.ClientResponse, outcome: Outcome) -> None:
    async for data in _events(response):
        if data == b"[DONE]":
            return
        try:
            chunk = json.loads(data)
            failed = "error" in chunk
            counts = chunk.get("usage") or {}
            shows = any(map(_text, chunk.get("choices") or ()))
        except (ValueError, AttributeError, TypeError) as error:
            raise Broken("stream") from error
        if failed:
            raise Broken("stream", _message(data.decode(errors="replace")))
        if shows:
            outcome.arrivals.append(time.perf_counter())
        outcome.prompt_tokens = counts.get("prompt_tokens", outcome.prompt_tokens)
        outcome.output_tokens = counts.get("completion_tokens", outcome.output_tokens)
    raise Broken("incomplete")


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the data of server-sent events."""
    rest = b""
    async for part in response.content.iter_any():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _message(answer: str) -> str:
    """Return what an error in OpenAI's form says, or the text itself where it is of another form."""
    try:
        return str(json.loads(answer)["error"]["message"])[:_SHOWN]
    except (ValueError, LookupError, TypeError):
        return answer.strip()[:_SHOWN]


def _text(choice: Mapping[str, Any]) -> bool:
    """Tell whether a choice of a chunk has something of the answer."""
    delta = choice.get("delta") or {}
    return bool(
        choice.get("text")
        or delta.get("content")
        or delta.get("reasoning_content")
        or delta.get("tool_calls")
    )
