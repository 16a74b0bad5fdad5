"""A terminal of any width to run the command line in, and a small checkpoint."""

from __future__ import annotations

import os
import pty
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import opgraft
import pytest
from conftest import Cli
from opgraft.cli import _run
from support.small_words import word_llama, word_tokenizer

Terminal = Callable[..., list[str]]


@pytest.fixture
def terminal(site, tmp_path: Path, warm_python: str) -> Terminal:
    """Run a command whose stdout is a terminal of ``columns``; returns the lines that it showed."""

    def run(*arguments: str, columns: int, **variables: str) -> list[str]:
        ours, theirs = pty.openpty()
        environ = {
            **os.environ,
            "PYTHONPATH": str(site.folder),
            "COLUMNS": str(columns),
            **variables,
        }
        shown: list[bytes] = []

        def read() -> None:
            try:
                while piece := os.read(ours, 1 << 16):
                    shown.append(piece)
            except OSError:  # how Linux says that nobody has the other end any more
                pass

        reader = threading.Thread(target=read)
        reader.start()
        command = [warm_python, "-m", "opgraft", *arguments]
        subprocess.run(
            command,
            env=environ,
            cwd=tmp_path,
            stdout=theirs,
            stderr=subprocess.DEVNULL,
            check=False,
        )
        os.close(theirs)
        reader.join(30)
        os.close(ours)
        return b"".join(shown).decode().replace("\r\n", "\n").splitlines()

    return run


@pytest.fixture
def in_one_round(capfd: pytest.CaptureFixture[str], one_round: None) -> Cli:
    """Run the command line in this process, where ``run --compare`` measures a round instead of a second."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        opgraft.reset()
        capfd.readouterr()
        code = _run(arguments)
        told = capfd.readouterr()
        return subprocess.CompletedProcess(arguments, code, told.out, told.err)

    return run


@pytest.fixture(scope="session")
def tokenizer():
    """A tokenizer of a few words."""
    return word_tokenizer()


@pytest.fixture(scope="session")
def causal_folder(tmp_path_factory) -> Path:
    """A random Llama of two layers, saved as a checkpoint folder."""
    return word_llama(tmp_path_factory.mktemp("causal"))
