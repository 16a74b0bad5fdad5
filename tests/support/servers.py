"""Servers as real processes on free ports, and small models for them."""

from __future__ import annotations

import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
from support.random_decoders import written
from support.warm.interpreter import process_of

START_SECONDS = 120
FAULTY = str(Path(__file__).with_name("faulty_server.py"))
PYTHON = [sys.executable]
"""The interpreter of the servers."""
WITHOUT_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""What clients of these servers take for TLS, which they do not use: to read certificates takes 40 ms each time."""
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
)
SETTINGS = {
    "model.dtype": "float32",
    "model.max_model_len": "512",
    "cache.block_size": "4",
    "cache.num_blocks": "256",
    "scheduler.max_num_seqs": "8",
    "load.progress": "false",
}


class OpenClient(httpx.Client):
    """A client of servers without TLS, which closes its connections when nobody has it any more."""

    def __init__(self, **options: Any) -> None:
        super().__init__(verify=WITHOUT_CERTIFICATES, **options)

    def __del__(self) -> None:
        self.close()


def write_model(folder: Path, tokenizer: Any, template: str | None = TEMPLATE) -> Path:
    """Write a Llama of one layer and random weights with a tokenizer of 400 tokens and a chat template."""
    sizes = {"vocab_size": 400, "max_position_embeddings": 4096, "num_hidden_layers": 1}
    written("Llama", folder, **sizes)
    tokenizer.save(str(folder / "tokenizer.json"))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@dataclass
class Server:
    """A server that runs."""

    process: subprocess.Popen[str]
    model: str
    shown: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    key: str = "none"
    asking: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(8))

    @property
    def pid(self) -> int:
        """The number of the process that serves."""
        return process_of(self.process.pid)

    @property
    def url(self) -> str:
        (line,) = [line for line in self.shown if line.startswith("url")]
        return line.split()[1].removesuffix("/v1")

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key=self.key,
            max_retries=0,
            http_client=OpenClient(timeout=60),
        )

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.request("POST", path, json=body)

    def send(self, path: str, body: bytes, kind: dict[str, str] | None = None) -> httpx.Response:
        """Send a body as it is."""
        kind = {"content-type": "application/json"} if kind is None else kind
        return self.request("POST", path, content=body, headers={**self.headers, **kind})

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a request, by options of httpx, whose headers replace those of the key."""
        given = {"headers": self.headers, "timeout": 60, **options}
        return httpx.request(method, f"{self.url}{path}", verify=WITHOUT_CERTIFICATES, **given)

    def later(self, ask: Callable[[], httpx.Response]) -> Future[httpx.Response]:
        """Ask beside other requests."""
        return self.asking.submit(ask)

    def complete(self, **body: Any) -> httpx.Response:
        return self.post(
            "/v1/completions",
            **{"model": self.model, "prompt": "the cat", "temperature": 0, **body},
        )

    def chat(self, **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "the cat"}]
        given = {
            "model": self.model,
            "messages": messages,
            "temperature": 0,
            "max_tokens": 5,
            **body,
        }
        return self.post("/v1/chat/completions", **given)

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        lines = self.get("/metrics").text.splitlines()
        values = [
            float(line.split()[-1]) for line in lines if re.match(rf"opgraft:{name}(\{{|\s)", line)
        ]
        assert values, f"there is no metric {name}"
        return sum(values)

    def requests(self) -> list[dict[str, Any]]:
        """Return the lines of the log that are of requests."""
        lines = [json.loads(line) for line in list(self.log) if line.startswith("{")]
        return [line for line in lines if "request_id" in line]

    def logged(self, answer: httpx.Response) -> dict[str, Any]:
        """Return the one line of the log that is of a request, which comes after its answer."""
        name = answer.headers["x-request-id"]
        until(lambda: any(line["request_id"] == name for line in self.requests()))
        (line,) = [line for line in self.requests() if line["request_id"] == name]
        return line

    def end(self, signal_number: int = signal.SIGTERM, seconds: float = 60) -> int:
        """Send a signal, and return the exit code."""
        self.process.send_signal(signal_number)
        return self.process.wait(seconds)


@contextmanager
def serving(
    model: Path | str,
    *options: str,
    step_seconds: float | None = None,
    variables: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Start a server on a free port, and kill it at the end if it still runs.

    With ``step_seconds`` each step is slowed by as much, and signals break the engine as ``faulty.py`` says.
    """
    settings = {} if isinstance(model, str) else SETTINGS
    given = [part for name, value in settings.items() for part in (f"--{name}", value)]
    program = ["-m", "opgraft"] if step_seconds is None else [FAULTY]
    given += (
        [] if step_seconds is None else ["--parallel.executor", "in_process"]
    )  # where the faults are
    command = [*PYTHON, *program, "serve", str(model), "--port", "0", *given, *options]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "STEP_SECONDS": str(step_seconds or 0),
        **(variables or {}),
    }
    process = subprocess.Popen(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    server = Server(process, Path(model).name)
    ready = threading.Event()
    readers = [
        threading.Thread(target=_read, args=(process.stdout, server.shown, ready)),
        threading.Thread(target=_read, args=(process.stderr, server.log, None)),
    ]
    for reader in readers:
        reader.start()
    try:
        assert ready.wait(START_SECONDS), "the server did not start:\n" + "".join(server.log)
        assert process.poll() is None or server.shown, "".join(server.log)
        yield server
    finally:
        process.kill()
        process.wait()
        server.asking.shutdown()
        for reader in readers:
            reader.join()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def _read(pipe: Any, lines: list[str], ready: threading.Event | None) -> None:
    for line in pipe:
        lines.append(line)
        if ready is not None and line.startswith("url"):
            ready.set()
    if ready is not None:
        ready.set()  # it has ended: nobody needs to wait any longer


def worked(server: Server) -> float:
    """The seconds of processor time that the server has had so far."""
    with open(f"/proc/{server.pid}/stat") as stat:
        user, system = stat.read().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def process_of_model(server: Server) -> int:
    """The process of the model."""
    (found,) = processes_of_model(server)
    return found


def processes_of_model(server: Server) -> list[int]:
    """The processes of the model, of which several engines have one each."""
    found = [
        path.read_text().split() for path in Path(f"/proc/{server.pid}/task").glob("*/children")
    ]
    started = [int(child) for children in found for child in children]
    return [process_of(child) for child in started if not _renders_templates(child)]


def _renders_templates(process: int) -> bool:
    return b"template_process" in Path(f"/proc/{process}/cmdline").read_bytes()


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)


def expect_idle(server: Server) -> None:
    """Wait until nothing runs, and nothing is left in the cache."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    until(lambda: not any(map(server.metric, names)))


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of an answer, which is of OpenAI's shape."""
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error, dict)
    return error
