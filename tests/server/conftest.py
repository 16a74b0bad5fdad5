"""Servers that several tests share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from server.processes import PYTHON, Server, serving, write_model
from support.small_tokenizers import trained_tokenizer

pytest.importorskip("fastapi")
pytest.importorskip("openai")


@pytest.fixture(scope="session", autouse=True)
def warm_servers(warm_python: str) -> Iterator[None]:
    """Servers start with what they import first."""
    PYTHON[:] = [warm_python]
    yield
    PYTHON[:] = [sys.executable]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder of random weights with a tokenizer and a chat template."""
    return write_model(tmp_path_factory.mktemp("served") / "llama", trained_tokenizer())


@pytest.fixture(scope="session")
def server(checkpoint: Path) -> Iterator[Server]:
    """A server of that model."""
    with serving(checkpoint) as running:
        yield running
