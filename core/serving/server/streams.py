"""Server-sent events, and the news of growing outputs."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, NamedTuple

from opgraft.engine.sampling_params import SamplingParams
from opgraft.serving.outputs import CompletionOutput, Logprob
from opgraft.serving.server.protocol import GenerationFields
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"


def event(data: Mapping[str, Any], name: str = "") -> bytes:
    """Return data as an event, with a name if the interface has named events."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    head = f"event: {name}\n" if name else ""
    # "replace", because a token may be half of a surrogate pair.
    return f"{head}data: {text}\n\n".encode("utf-8", "replace")


class JSONAnswer(JSONResponse):
    """A whole answer of JSON."""

    def render(self, content: Any) -> bytes:
        """Return the answer as bytes."""
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        # "replace", because a client's text may have half of a surrogate pair.
        return text.encode("utf-8", "replace")


class EventStream(Response):
    """An answer of events. After an error, the last event is the error.

    Args:
        events: from ``event``. The next event is made when the reader has taken the last one.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self.events = events
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        async with aclosing(self.events) as events:
            head = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **head})
            try:
                async for body in events:
                    await send(
                        {
                            "type": "http.response.body",
                            "body": body,
                            "more_body": True,
                        }
                    )
            except Exception as error:
                await scope["state"]["passing"].fail(error)
            else:
                await send(
                    {
                        "type": "http.response.body",
                        "body": b"",
                        "more_body": False,
                    }
                )


class News(NamedTuple):
    """News of an answer.

    Attributes:
        text: new text.
        tokens: new token ids.
        logprobs: of the new tokens. Empty if the request wants none.
        first: these are the first news of the answer.
    """

    text: str
    tokens: list[int]
    logprobs: list[Mapping[int, Logprob]]
    first: bool


class SentParts:
    """Keeps the sent part of each answer of a stream, to find the news."""

    def __init__(self) -> None:
        self._told: dict[tuple[int, int], tuple[int, int]] = {}
        self._ended: set[tuple[int, int]] = set()

    def news(self, prompt: int, answer: CompletionOutput) -> News | None:
        """Return the news of an answer, or None if there is nothing to show yet."""
        key = (prompt, answer.index)
        if key in self._ended:
            return None
        first = key not in self._told
        characters, tokens = self._told.get(key, (0, 0))
        # A new token may be a part of a character, without new text.
        if len(answer.text) == characters and not answer.finished and not first:
            return None
        self._told[key] = (len(answer.text), len(answer.token_ids))
        if answer.finished:
            self._ended.add(key)
        return News(
            answer.text[characters:],
            answer.token_ids[tokens:],
            (answer.logprobs or [])[tokens:],
            first,
        )


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Return the tokens of a request as OpenAI counts them. Cached tokens are of the prompt."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def finite(logprob: float) -> float:
    """Return a log-probability for JSON. JSON has no infinity."""
    return max(logprob, -9999.0)


def of_place(ranked: Mapping[int, Logprob] | None) -> dict[str, Any] | None:
    """Return the log-probabilities at a place of a prompt in vLLM's form, None at the first."""
    if ranked is None:
        return None
    return {
        str(token): {
            "logprob": finite(each.logprob),
            "rank": each.rank,
            "decoded_token": each.decoded_token,
        }
        for token, each in ranked.items()
    }


def text_of_id(token: int) -> str:
    """Return a text that names the id of a token, as vLLM writes it."""
    return f"token_id:{token}"


def token_text(token: int, ranked: Mapping[int, Logprob], body: GenerationFields) -> str:
    """Return the text of a token.

    The text names the id if the request wants ids, or if there is no tokenizer.
    """
    text = ranked[token].decoded_token
    if text is None or body.return_tokens_as_token_ids:
        return text_of_id(token)
    return text


def likeliest(ranked: Mapping[int, Logprob], params: SamplingParams) -> list[int]:
    """Return the likeliest tokens at a place, as many as the request wants."""
    wanted = params.logprobs or 0
    by_rank = sorted(ranked, key=lambda token: -ranked[token].logprob)
    return by_rank[:wanted]
