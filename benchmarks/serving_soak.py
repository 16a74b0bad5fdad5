"""Requests of every kind that a server takes or refuses, sent for a long time, and what is left of them behind it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from engine_rows import Finding
from opgraft.base.text import printable
from serving_prompts import random_prompts
from serving_sides import Served, process_memory

WORKERS = 8
"""Clients at a time."""

SECONDS = 60
"""After which a request that has no answer hangs."""

LEFT = "left"
"""The outcome of a request whose client does not wait for the answer."""

IDLE = (
    "kv_cache_usage_perc",
    "num_requests_running",
    "num_requests_waiting",
    "admitted_sequences",
    "admitted_tokens",
)
"""Metrics that are 0 where nothing is left of any request."""

DRAIN = 30
"""Seconds that a server which is told to end waits for requests that it has not answered."""

SETTLED = 0.01
"""Growth of memory in a run, by which allocators and caches have reached their size."""

RUNS = 5
"""Runs before the one that is measured, at most: what grows in all of them is no allocator's."""

MOST_GRAMMARS = 128
"""Grammars that a server keeps, however many have been asked for."""

Fields = Callable[[random.Random], dict[str, Any]]


@dataclass(frozen=True)
class Kind:
    """A kind of request.

    Attributes:
        expected: the status of a right answer.
        path: it goes there.
        make: returns the fields of a body, or the body as bytes; None for a GET.
        named: whether the name of the model is a field besides.
    """

    expected: int
    path: str
    make: Callable[[random.Random], dict[str, Any] | bytes] | None = None
    named: bool = True


def _text(source: random.Random) -> str:
    return str(random_prompts(1, source.randrange(1, 100), source.randrange(10**9))[0].content)


def _completion(**fields: Any) -> Fields:
    return lambda source: {
        "prompt": _text(source),
        "max_tokens": source.randrange(1, 100),
        **fields,
    }


def _chat(**fields: Any) -> Fields:
    def make(source: random.Random) -> dict[str, Any]:
        messages = [{"role": "user", "content": _text(source)}]
        return {"messages": messages, "max_tokens": source.randrange(1, 60), **fields}

    return make


def _response(**fields: Any) -> Fields:
    return lambda source: {
        "input": _text(source),
        "max_output_tokens": source.randrange(1, 60),
        **fields,
    }


def _schema(source: random.Random) -> dict[str, Any]:
    """Return a chat with a schema that was never there before."""
    names = {f"f{source.randrange(10**9)}": {"type": "integer", "maximum": source.randrange(10**4)}}
    schema = {
        "type": "object",
        "properties": names,
        "required": list(names),
        "additionalProperties": False,
    }
    return _chat(
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    )(source)


def _tool(source: random.Random) -> dict[str, Any]:
    """Return a chat in which one of two functions has to be called."""
    parameters = {
        "type": "object",
        "properties": {"where": {"enum": ["here", "there"]}},
        "required": ["where"],
    }
    names = ("look", f"go{source.randrange(8)}")
    tools = [
        {"type": "function", "function": {"name": name, "parameters": parameters}} for name in names
    ]
    return _chat(tools=tools, tool_choice="required")(source)


_UNFIT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
KINDS: Mapping[str, Kind] = {
    "completion": Kind(200, COMPLETIONS, _completion(ignore_eos=True)),
    "completion, streamed": Kind(200, COMPLETIONS, _completion(stream=True, stop=["e"])),
    "completion, several answers": Kind(
        200, COMPLETIONS, _completion(n=3, temperature=1.0, logprobs=3, echo=True)
    ),
    "completion, several prompts": Kind(
        200, COMPLETIONS, _completion(prompt=["one", "two"], logit_bias={"9": -5})
    ),
    "completion, bad value": Kind(400, COMPLETIONS, _completion(temperature=-1)),
    "completion, too long": Kind(400, COMPLETIONS, _completion(max_tokens=10**9)),
    "completion, unknown field": Kind(200, COMPLETIONS, _completion(unknown=1)),
    "completion, unknown token": Kind(400, COMPLETIONS, _completion(prompt=[10**6])),
    "completion, unknown model": Kind(404, COMPLETIONS, _completion(model="none"), named=False),
    "chat": Kind(200, CHAT, _chat(logprobs=True, top_logprobs=2)),
    "chat, streamed": Kind(200, CHAT, _chat(stream=True, stream_options={"include_usage": True})),
    "chat, template that raises": Kind(
        400, CHAT, _chat(messages=[{"role": "user", "content": "raise"}])
    ),
    "chat, template beyond its limits": Kind(
        400, CHAT, _chat(chat_template_kwargs={"turns": 10**9})
    ),
    "chat, object": Kind(200, CHAT, _chat(response_format={"type": "json_object"}, stream=True)),
    "chat, new schema": Kind(200, CHAT, _schema),
    "chat, bad schema": Kind(400, CHAT, _chat(response_format=_UNFIT)),
    "chat, tool": Kind(200, CHAT, _tool),
    "response": Kind(200, RESPONSES, _response()),
    "response, streamed": Kind(200, RESPONSES, _response(stream=True)),
    "message": Kind(200, MESSAGES, _chat()),
    "message, streamed": Kind(200, MESSAGES, _chat(stream=True)),
    "tokenize": Kind(200, "/tokenize", lambda source: {"prompt": _text(source)}),
    "detokenize": Kind(
        200, "/detokenize", lambda source: {"tokens": source.choices(range(200), k=50)}
    ),
    "no JSON": Kind(400, CHAT, lambda source: b'{"model": ' + source.randbytes(50)),
    "deep JSON": Kind(400, CHAT, lambda _: b"[" * 100_000),
    "body too large": Kind(413, COMPLETIONS, lambda _: b" " * (5 << 20)),
    "embedding of a language model": Kind(
        400, "/v1/embeddings", lambda source: {"input": _text(source)}
    ),
    "nowhere": Kind(404, "/nowhere", lambda _: {}),
    "metrics": Kind(200, "/metrics"),
    "health": Kind(200, "/health"),
}
"""For a language model."""

ENCODER_KINDS: Mapping[str, Kind] = {
    "embedding": Kind(200, "/v1/embeddings", lambda source: {"input": _text(source)}),
    "embeddings": Kind(
        200, "/v1/embeddings", lambda source: {"input": [_text(source) for _ in range(9)]}
    ),
    "embedding of nothing": Kind(400, "/v1/embeddings", lambda _: {"input": []}),
    "pooling": Kind(200, "/pooling", lambda source: {"input": _text(source)}),
    "score": Kind(
        200, "/score", lambda source: {"text_1": _text(source), "text_2": [_text(source)] * 3}
    ),
    "rerank": Kind(
        200, "/rerank", lambda source: {"query": _text(source), "documents": [_text(source)] * 3}
    ),
    "completion of an encoder": Kind(400, COMPLETIONS, _completion()),
    "tokenize": Kind(200, "/tokenize", lambda source: {"prompt": _text(source)}),
    "metrics": Kind(200, "/metrics"),
}
"""For an encoder."""

LAST_EVENTS: Mapping[str, tuple[bytes, ...]] = {
    RESPONSES: (b"event: response.completed\n", b"event: response.incomplete\n"),
    MESSAGES: (b"event: message_stop\n",),
}
"""Path → possible beginnings of the last event of a stream; other streams end with ``[DONE]``."""

_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
SENT: Mapping[str, tuple[bytes, str]] = {
    "no HTTP": (b"hello\r\n\r\n", "400"),
    "flood of headers": (b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 300 + b"\r\n", "431"),
    "half a head": (_HEAD, LEFT),
    "half a body": (_HEAD + b'content-length: 1000\r\n\r\n{"model"', LEFT),
    "two lengths": (
        _HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        "400",
    ),
}
"""Requests over connections of their own, and the status of the answer; with ``LEFT``, none is waited for."""


@dataclass
class Soak:
    """A server under requests of many kinds.

    Attributes:
        served: the server.
        kinds: of requests, by name.
        counts: what became of the requests of each kind: a status, ``LEFT``, ``timeout``, ``connection``,
            ``broken``; a refusal that is not expected has the answer behind its status.
    """

    served: Served
    kinds: Mapping[str, Kind]
    counts: dict[str, Counter[str]] = field(default_factory=dict)

    async def ask(self, seconds: float, seed: int) -> None:
        """Ask with all workers for some time, each kind at least once by each."""
        until = time.perf_counter() + seconds
        self.counts = self.counts or {name: Counter() for name in (*self.kinds, *SENT)}
        timeout = aiohttp.ClientTimeout(SECONDS)
        async with aiohttp.ClientSession(self.served.url, timeout=timeout) as session:
            async with session.get("/v1/models") as response:
                model = (await response.json())["data"][0]["id"]
            sources = [random.Random(seed * WORKERS + worker) for worker in range(WORKERS)]  # noqa: S311 - no secret
            await asyncio.gather(*(self._work(session, model, source, until) for source in sources))

    async def _work(
        self, session: aiohttp.ClientSession, model: str, source: random.Random, until: float
    ) -> None:
        begun = False
        while not begun or time.perf_counter() < until:
            begun = True
            for name in source.sample(list(self.counts), len(self.counts)):
                if name in SENT:
                    outcome = await _send(self.served.url, *SENT[name])
                else:
                    outcome = await _patiently(
                        _request(session, model, self.kinds[name], source), source
                    )
                self.counts[name][outcome] += 1

    def findings(self) -> Iterator[Finding]:
        """Say of each kind which share of its requests was answered as it should be, of those that were waited for."""
        for name, counts in self.counts.items():
            expected = SENT[name][1] if name in SENT else str(self.kinds[name].expected)
            waited = counts.total() - (0 if expected == LEFT else counts[LEFT])
            detail = ", ".join(f"{outcome}: {count}" for outcome, count in sorted(counts.items()))
            yield Finding(f"{name}: {expected}", counts[expected] / max(waited, 1), detail, least=1)

    @property
    def hung(self) -> int:
        """The number of requests that had no answer in time."""
        return sum(counts["timeout"] for counts in self.counts.values())


async def _patiently(asking: Any, source: random.Random) -> str:
    """Wait for an answer, or leave early, as one client of four does."""
    try:
        return str(await asyncio.wait_for(asking, source.choice((0.01, 0.05, *[2 * SECONDS] * 6))))
    except asyncio.TimeoutError:
        return LEFT


async def _request(
    session: aiohttp.ClientSession, model: str, kind: Kind, source: random.Random
) -> str:
    """Ask, read the answer to its end, and return its status."""
    given = kind.make(source) if kind.make is not None else None
    body = (
        json.dumps({"model": model, **given} if kind.named else given)
        if isinstance(given, dict)
        else given
    )
    headers = {"content-type": "application/json"}
    try:
        method = "GET" if kind.make is None else "POST"
        async with session.request(method, kind.path, data=body, headers=headers) as response:
            content = await response.read()
    except asyncio.TimeoutError:
        return "timeout"
    except (aiohttp.ClientError, OSError):
        return "connection"
    if response.status not in (200, kind.expected):
        return f"{response.status} {printable(content[:200].decode(errors='replace'))}"  # why is what one wants to know
    streamed = response.content_type == "text/event-stream"
    return "broken" if streamed and not _is_whole(kind.path, content) else str(response.status)


def _is_whole(path: str, stream: bytes) -> bool:
    """Return True if a stream has come to its end without an error."""
    last = stream.removesuffix(b"\n\n").rpartition(b"\n\n")[2]
    if path in LAST_EVENTS:
        return last.startswith(LAST_EVENTS[path])
    return last == b"data: [DONE]" and b'"error"' not in stream


async def _send(url: str, content: bytes, expected: str) -> str:
    """Send bytes over a connection of their own, and return the status of the answer."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(content)
        await writer.drain()
        if expected == LEFT:
            return LEFT
        answer = await asyncio.wait_for(reader.read(), SECONDS)
        return answer[9:12].decode("ascii", "replace") or "connection"
    except asyncio.TimeoutError:
        return "timeout"
    except OSError:
        return "connection"
    finally:
        writer.close()


@dataclass(frozen=True)
class Remains:
    """The holdings of a server that has nothing to do: bytes of memory, open files with its connections, processes."""

    memory: int
    files: int
    processes: int

    @classmethod
    def of(cls, served: Served) -> Remains:
        """Look at a server."""
        tasks = Path(f"/proc/{served.pid}/task").iterdir()
        processes = [
            child
            for task in tasks
            for child in (task / "children").read_text(encoding="utf-8").split()
        ]
        return cls(
            process_memory(served.pid), len(os.listdir(f"/proc/{served.pid}/fd")), len(processes)
        )


def soaked(
    servers: Sequence[tuple[str, Served, Mapping[str, Kind]]], minutes: float
) -> Iterator[Finding]:
    """Ask servers at once for all sorts of things for a long time, look at what is left behind, and end them."""
    soaks = {name: Soak(served, kinds) for name, served, kinds in servers}

    def run(seconds: float, seed: int) -> list[Remains]:
        async def ask() -> None:
            await asyncio.gather(*(soak.ask(seconds, seed) for soak in soaks.values()))

        asyncio.run(ask())
        return [_settled(soak.served) for soak in soaks.values()]

    before = run(max(20, minutes * 6), 0)
    for seed in range(1, RUNS):
        last, before = before, run(max(20, minutes * 6), seed)
        if all(
            now.memory < (1 + SETTLED) * then.memory for now, then in zip(before, last, strict=True)
        ):
            break
    after = run(minutes * 54, RUNS)
    for (name, soak), *remains in zip(soaks.items(), before, after, strict=True):
        findings = [*soak.findings(), *left(soak, *remains)]
        yield from (replace(each, name=f"{name}, {each.name}") for each in findings)


def _settled(served: Served) -> Remains:
    """Look at a server that has had the time to see that all clients have left."""
    until = time.perf_counter() + 10
    while any(map(served.metric, IDLE)) and time.perf_counter() < until:
        time.sleep(0.1)
    time.sleep(1)
    return Remains.of(served)


def left(soak: Soak, before: Remains, after: Remains) -> Iterator[Finding]:
    """Say what is left behind by the requests to a server, and end it."""
    served, asked = soak.served, sum(counts.total() for counts in soak.counts.values())
    yield Finding(
        "hung requests", soak.hung, f"of {asked}, without an answer for {SECONDS} s", most=0
    )
    for metric in IDLE:
        yield Finding(metric, served.metric(metric), "when all clients have left", most=0)
    if "chat, new schema" in soak.counts:
        detail = f"of {soak.counts['chat, new schema'].total()} schemas, none like another"
        yield Finding("grammars kept", served.metric("grammars_kept"), detail, most=MOST_GRAMMARS)
    yield Finding(
        "files and connections left", after.files - before.files, f"{after.files} are open", most=0
    )
    yield Finding(
        "processes left", after.processes - before.processes, f"{after.processes} run", most=0
    )
    megabytes = f"from {before.memory / 1e6:.0f} to {after.memory / 1e6:.0f} MB"
    yield Finding("growth of memory", after.memory / before.memory - 1, megabytes, most=0.05)
    code, seconds = served.end()
    yield Finding(
        "end after SIGTERM, s", seconds, f"a request that hangs is waited for {DRAIN} s", most=DRAIN
    )
    yield Finding("exit code", abs(code), "0 says that all has ended well", most=0)
