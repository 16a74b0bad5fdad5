"""Ctrl-C in a real process: a first one ends after the step, a second one at once, wherever they come."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.small_words import word_llama

pytest.importorskip("transformers")

SLOW = """
import signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # who started the tests may ignore it
from opgraft.engine.runner.model_runner import ModelRunner

noted = threading.Event()

def slowly(name, seconds):
    original = getattr(ModelRunner, name)

    def slow(self, *arguments):
        print("now", file=sys.stderr, flush=True)
        if seconds == "until noted":
            noted.wait()
        else:
            time.sleep(float(seconds))
        return original(self, *arguments)

    setattr(ModelRunner, name, slow)

def generate(model):
    from opgraft import LLM
    settings = {"cache.num_blocks": 100, "load.progress": False, "max_num_batched_tokens": 1, "max_num_seqs": 1}
    LLM(model, **settings).generate("the cat", progress=False)

def command(*words):
    from opgraft.cli import main
    limits = ["--scheduler.max_num_batched_tokens=1", "--scheduler.max_num_seqs=1"]
    sys.argv[1:] = [*words, "--cache.num_blocks=100", "--load.progress=false", *limits]
    main()

def tell_of_the_first():
    from opgraft.serving.llm import LLM
    leave = LLM._leave_and_wait

    def told(self, *arguments):
        print("noted", file=sys.stderr, flush=True)
        noted.set()
        return leave(self, *arguments)

    LLM._leave_and_wait = told

what, model, slow, seconds = sys.argv[1:]
slowly(slow, seconds)
tell_of_the_first()
if what == "generate":
    generate(model)
elif what == "run":
    command("run", model, "the cat")
else:
    command("chat", model)
"""
WAYS = ("generate", "run", "chat")


def ways(slow: str, seconds: str, short: str) -> list[Any]:
    """Make a parameter of each way; 'make test' runs ``short`` alone."""
    return [
        pytest.param((way, slow, seconds), marks=[pytest.mark.slow] * (way != short))
        for way in WAYS
    ]


ENDED_BY_INTERRUPT = (-signal.SIGINT, 128 + signal.SIGINT, 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return word_llama(tmp_path_factory.mktemp("llama"), chats=True)


class Process:
    """A process that says ``now`` where the test interrupts, and ``noted`` once it waits for the end of the step."""

    def __init__(self, python: str, *words: str) -> None:
        self.process = subprocess.Popen(
            [python, "-c", SLOW, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        if words[0] == "chat":
            assert self.process.stdin is not None
            self.process.stdin.write("the cat\n")
            self.process.stdin.flush()

    def wait_for(self, word: str) -> None:
        assert self.process.stderr is not None
        lines = []
        while (line := self.process.stderr.readline()) != f"{word}\n":
            lines.append(line)
            assert line, "".join(lines)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)


@pytest.fixture
def interrupted(request: pytest.FixtureRequest, model: Path, warm_python: str) -> Iterator[Process]:
    what, slow, seconds = request.param
    process = Process(warm_python, what, str(model), slow, seconds)
    yield process
    process.process.kill()
    process.process.communicate()


@pytest.mark.parametrize("interrupted", ways("execute", "600", short="run"), indirect=True)
def test_a_second_interrupt_ends_at_once(interrupted: Process) -> None:
    """The first waits for the end of the step, which does not come; the second does not wait."""
    interrupted.wait_for("now")
    interrupted.interrupt()
    interrupted.wait_for("noted")  # two signals at once would be one
    time.sleep(0.5)
    assert interrupted.process.poll() is None
    interrupted.interrupt()
    _, errors = interrupted.process.communicate(timeout=300)
    assert interrupted.process.returncode in ENDED_BY_INTERRUPT, errors


@pytest.mark.parametrize("interrupted", ways("load_model", "600", short="chat"), indirect=True)
def test_an_interrupt_ends_the_loading(interrupted: Process) -> None:
    """There is nothing to keep while a model is loaded: one interrupt is enough."""
    interrupted.wait_for("now")
    interrupted.interrupt()
    _, errors = interrupted.process.communicate(timeout=60)
    assert interrupted.process.returncode in ENDED_BY_INTERRUPT, errors


@pytest.mark.parametrize(
    "interrupted", ways("execute", "until noted", short="generate"), indirect=True
)
def test_a_first_interrupt_ends_after_the_step(interrupted: Process) -> None:
    """A prompt in chunks gives no token for many steps: nothing more of it is computed than the step that runs."""
    interrupted.wait_for("now")
    interrupted.interrupt()
    _, errors = interrupted.process.communicate(timeout=60)
    assert "now\n" not in errors
    assert interrupted.process.returncode in (*ENDED_BY_INTERRUPT, 0)
