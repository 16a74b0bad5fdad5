"""The two sides of the serving benchmark, each a process: ``opgraft serve``, and the same engine without a server."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from opgraft import LLM, SamplingParams
from serving_prompts import random_prompts

WORDS = 50
"""Of each prompt."""

CONTEXT = 4096
"""Tokens that the tiny model can have before it."""

SETTINGS: dict[str, Any] = {"scheduler.max_num_seqs": 64, "load.progress": False}
TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'raise' %}{{ raise_exception('no such message') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}{% for _ in range(turns or 0) %}.{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
)
"""Of chats: a message can make it raise, and ``turns`` loop for longer than it may."""

_TICKS = os.sysconf("SC_CLK_TCK")


def write_tiny(folder: Path) -> str:
    """Write a model of random weights whose steps take next to no time, so that what is around them shows."""
    import tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(
        [str(prompt.content) for prompt in random_prompts(9, 99, 0)], trainer
    )
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=CONTEXT, **shape
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return str(folder)


@dataclass(frozen=True)
class Work:
    """Requests of a comparison, and the tokens of each answer."""

    requests: int = 64
    tokens: int = 64

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of both sides, whose context has room for a prompt and its answer."""
        return {**SETTINGS, "model.max_model_len": self.tokens + 448}


@dataclass(frozen=True)
class Cost:
    """Seconds that some work took on the clock, and of CPU time of its process."""

    seconds: float
    cpu_seconds: float


def family(pid: int) -> list[int]:
    """Return a process with all that it has started, and these have."""
    children = [
        path.read_text(encoding="utf-8").split()
        for path in Path(f"/proc/{pid}/task").glob("*/children")
    ]
    return [pid, *(each for found in children for child in found for each in family(int(child)))]


def process_cpu(pid: int) -> float:
    """Return the seconds of CPU time that a process and its children that run have used."""
    return sum(map(_cpu, family(pid)))


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def process_memory(pid: int) -> int:
    """Return the bytes that a process and its children hold in memory."""
    pages = (
        Path(f"/proc/{each}/statm").read_text(encoding="utf-8").split()[1] for each in family(pid)
    )
    return sum(map(int, pages)) * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Served:
    """A server that runs."""

    url: str
    process: subprocess.Popen[str]

    @property
    def pid(self) -> int:
        return self.process.pid

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:  # noqa: S310 - our own server
            lines = answer.read().decode().splitlines()
        values = [float(line.split()[-1]) for line in lines if line.startswith(f"opgraft:{name}{{")]
        if not values:
            raise SystemExit(
                f"the server has no metric opgraft:{name}: see its /metrics for those that it has"
            )
        return sum(values)

    def end(self) -> tuple[int, float]:
        """Have the server drain and end, and return its exit code and the seconds until then."""
        start = time.perf_counter()
        self.process.terminate()
        return self.process.wait(120), time.perf_counter() - start


@contextmanager
def serving(model: str, **settings: Any) -> Iterator[Served]:
    """Run a server, one thread for its products, until the end of the block."""
    given = [part for name, value in settings.items() for part in (f"--{name}", str(value).lower())]
    command = [sys.executable, "-m", "opgraft", "serve", model, "--port", "0", *given]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        try:
            yield Served(_url(_stdout(process)), process)
        finally:
            process.terminate()
            process.wait(60)


class _Taking(http.server.BaseHTTPRequestHandler):
    """Takes what is sent, and keeps nothing."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Write no log."""


@contextmanager
def spans_taken() -> Iterator[str]:
    """Take spans at a URL, until the end of the block."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Taking) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listener.server_port}"
        listener.shutdown()


def _url(lines: IO[str]) -> str:
    for line in lines:
        if line.startswith("url"):
            return line.split()[1].removesuffix("/v1")
    raise SystemExit(
        "the server has ended before it listened: run 'opgraft serve' by hand to see why"
    )


@contextmanager
def offline(model: str, work: Work) -> Iterator[subprocess.Popen[str]]:
    """Run the engine without a server; ``answer`` has it answer the work."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, model, str(work.requests), str(work.tokens)]
    with subprocess.Popen(
        command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def answer(process: subprocess.Popen[str], seed: int) -> Cost:
    """Have the engine of ``offline`` answer the prompts of a seed."""
    if process.stdin is None:
        raise SystemExit("the engine has no stdin: start it by offline()")
    process.stdin.write(f"{seed}\n")
    process.stdin.flush()
    return Cost(**json.loads(_stdout(process).readline()))


def _stdout(process: subprocess.Popen[str]) -> IO[str]:
    if process.stdout is None:
        raise SystemExit("a process has no stdout: start it with a pipe")
    return process.stdout


def main() -> None:
    """Answer the prompts of each seed that comes on stdin."""
    model, requests, tokens = sys.argv[1:]
    work = Work(int(requests), int(tokens))
    llm = LLM(model, **work.settings)
    params = SamplingParams(temperature=0, max_tokens=work.tokens, ignore_eos=True)
    for line in sys.stdin:
        prompts = [
            str(prompt.content) for prompt in random_prompts(work.requests, WORDS, int(line))
        ]
        start, cpu = time.perf_counter(), time.process_time()
        llm.generate(prompts, params)
        cost = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
        print(json.dumps(cost), flush=True)


if __name__ == "__main__":
    main()
