"""``opgraft chat`` in a terminal and over a pipe."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.small_words import WORDS, word_llama

transformers = pytest.importorskip("transformers")

SETTINGS = ("--cache.num_blocks", "200", "--load.progress", "false")

CHAT = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # who started the tests may ignore it
from opgraft.cli import main
main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that never ends an answer, whose context is long."""
    return word_llama(
        tmp_path_factory.mktemp("chats"),
        chats=True,
        max_position_embeddings=6000,
        eos_token_id=None,
    )


@pytest.fixture
def chat(tmp_path: Path, warm_python: str) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts the command with the given files; what is left of it ends with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str, **files: int) -> subprocess.Popen[bytes]:
        command = [warm_python, "-c", CHAT, "chat", *arguments, *SETTINGS]
        process = subprocess.Popen(command, cwd=tmp_path, **{"stderr": subprocess.PIPE, **files})  # type: ignore[call-overload]
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream:
                stream.close()


def piped(
    chat: Callable[..., subprocess.Popen[bytes]], text: str, *arguments: str
) -> tuple[int, str, str]:
    process = chat(*arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    stdout, stderr = process.communicate(text.encode(), timeout=240)
    return process.returncode, stdout.decode(), stderr.decode()


def test_lines_are_messages_of_one_chat(chat, folder: Path) -> None:
    """Each line is answered; the first answer is repeated after /clear, what follows /exit is not read."""
    text = "the cat\nthe cat\n\n/clear\nthe cat\n/exit\na dog\n"
    code, stdout, stderr = piped(chat, text, str(folder), "--max-tokens", "5")
    assert code == 0, stderr
    first, second, third = stdout.splitlines()
    assert first == third
    assert second != first, "the model knows what was said before"
    assert "the cache holds 6,400 tokens" in stderr


def test_answers_cannot_command_the_terminal(chat, tmp_path: Path) -> None:
    """Terminal sequences that a model writes are shown escaped."""
    folder = word_llama(tmp_path / "model", chats=True, eos_token_id=None)
    file = folder / "tokenizer.json"
    text = file.read_text()
    for word in WORDS:
        text = text.replace(f'"{word}":', f'"\\u001b[31m{word}":')
    file.write_text(text)
    code, stdout, stderr = piped(chat, "hello\n", str(folder), "--max-tokens", "5")
    assert code == 0, stderr
    assert "\\x1b[31m" in stdout
    assert "\x1b" not in stdout + stderr


def test_a_model_without_template_is_refused(chat, causal_folder: Path) -> None:
    """A model that has no chat template is an error that names the way to use it."""
    code, stdout, stderr = piped(chat, "the cat\n", str(causal_folder))
    assert (code, stdout) == (2, "")
    assert "has no chat template" in stderr
    assert "opgraft run MODEL PROMPT" in stderr


def test_an_encoder_is_refused_with_what_it_is_for(chat, tmp_path: Path) -> None:
    """A model that embeds texts is an error that says so, before weights are loaded."""
    config = transformers.BertConfig(
        vocab_size=32,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
    )
    folder = tmp_path / "encoder"
    transformers.BertModel(config).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    # Without this one, no loading succeeds.
    del weights["encoder.layer.0.output.dense.weight"]
    save_file(weights, folder / "model.safetensors")
    code, stdout, stderr = piped(chat, "the cat\n", str(folder))
    assert (code, stdout) == (2, "")
    assert "is an encoder, and embeds texts: 'opgraft run MODEL TEXT" in stderr


def test_a_chat_that_becomes_too_long_is_an_error(chat, folder: Path) -> None:
    """Over a pipe the chat ends with the message that does not fit."""
    code, stdout, stderr = piped(
        chat, "the cat\n" * 3, str(folder), "--max-tokens", "20", "--model.max_model_len", "40"
    )
    assert code == 2
    assert len(stdout.splitlines()) == 2, "the second answer ends with the context"
    assert "and this model's maximum context length is 40" in stderr


class Screen:
    """What a terminal shows."""

    def __init__(self, file: int) -> None:
        self.file = file
        self.text = ""

    def until(self, pattern: str, again: Callable[[], object] = lambda: None) -> str:
        """Read until the pattern is found after what was read before; each silent second, do something again."""
        deadline = time.monotonic() + 120
        came = ""
        while not re.search(pattern, came):
            assert time.monotonic() < deadline, came
            if select.select([self.file], [], [], 1.0)[0]:
                came += os.read(self.file, 1 << 16).decode()
            else:
                again()
        return came

    def type(self, text: str) -> None:
        os.write(self.file, text.encode())


def test_a_terminal(chat, folder: Path) -> None:
    """Answers stream after a prompt; Ctrl-C ends the answer and the chat goes on; Ctrl-D ends it."""
    ours, theirs = pty.openpty()
    process = chat(str(folder), "--max-tokens", "5000", stdin=theirs, stdout=theirs)
    os.close(theirs)
    screen = Screen(ours)
    screen.until("> $")
    screen.type("/clean\n")
    screen.until("> $")
    screen.type("the cat\n")
    screen.until(r"(\w+ ){20}")

    def interrupt() -> None:
        process.send_signal(signal.SIGINT)

    interrupt()
    screen.until("> $")
    interrupt()  # which is lost where it comes between the prompt and the wait for a key
    screen.until("> $", again=interrupt)
    screen.type("/clear\n")
    screen.until("> $")
    screen.type("\x04")
    assert process.wait(60) == 0
    assert b"there is no command /clean: /clear begins a new chat" in process.stderr.read()
    os.close(ours)
