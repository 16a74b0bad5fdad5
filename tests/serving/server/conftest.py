"""Servers that several tests share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.servers import PYTHON, Server, serving, write_model
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
def recorder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of that model with a template that writes each field of a message."""
    template = tmp_path_factory.mktemp("templates") / "fields.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n"
        "{% if m.reasoning_content %}why: {{ m.reasoning_content }}\n{% endif %}"
        "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}"
        "{% if m.tool_call_id %}of: {{ m.tool_call_id }}{% endif %}{% endfor %}"
        "{% if enable_thinking is defined and not enable_thinking %}without any thought{% endif %}"
    )
    with serving(checkpoint, "--chat-template", str(template)) as running:
        yield running


@pytest.fixture(scope="session")
def server(checkpoint: Path) -> Iterator[Server]:
    """A server of that model."""
    with serving(checkpoint) as running:
        yield running
