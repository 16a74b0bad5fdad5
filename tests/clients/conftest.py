"""One server of SmolLM2 for all clients. ``make test-clients`` runs these tests.

The clients have an environment of their own, without opgraft. The server runs in that of opgraft.
"""

from __future__ import annotations

import os
import queue
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PYTHON = REPOSITORY / ".venv" / "bin" / "python"
PATIENCE = 300.0
"""Seconds until the server tells its URL."""
COMMAND = ("-m", "opgraft", "serve", "smollm2", "--port", "0")
SAVE_TOKENIZER = """
import sys
from opgraft.models.files import open_weights
from opgraft.serving.tokenizer import open_tokenizer
from transformers import PreTrainedTokenizerFast
found = open_tokenizer(open_weights("smollm2"))
saved = PreTrainedTokenizerFast(tokenizer_object=found.backend, **found.special_tokens)
saved.chat_template = found.chat_templates["default"]
saved.save_pretrained(sys.argv[1])
"""
"""SmolLM2 comes as a GGUF file, and most clients read tokenizer.json alone."""

# Clients that would report to their makers, or fetch lists of prices.
os.environ.update(
    DO_NOT_TRACK="1",
    HAYSTACK_TELEMETRY_ENABLED="False",
    HF_HUB_OFFLINE="1",
    LANGSMITH_TRACING="false",
    LITELLM_LOCAL_MODEL_COST_MAP="True",
    OPENAI_AGENTS_DISABLE_TRACING="1",
    PROMPTFOO_DISABLE_TELEMETRY="1",
    PROMPTFOO_DISABLE_UPDATE="1",
)


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """Start ``opgraft serve smollm2``, and return its URL without ``/v1``.

    The variable ``CLIENTS_SERVER`` has the URL of a server that runs already.
    """
    if "CLIENTS_SERVER" in os.environ:
        yield os.environ["CLIENTS_SERVER"]
        return
    process = subprocess.Popen([PYTHON, *COMMAND], stdout=subprocess.PIPE, text=True)
    urls: queue.Queue[str] = queue.Queue()
    reader = threading.Thread(target=_read_all, args=(process, urls), daemon=True)
    reader.start()
    try:
        url = urls.get(timeout=PATIENCE)
        assert url, "the server did not start"
        yield url.removesuffix("/v1")
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(60)


@pytest.fixture(scope="session")
def base_url(server: str) -> str:
    """The URL that users give to clients."""
    return f"{server}/v1"


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tokenizer of SmolLM2, for clients that make prompts of a given length."""
    folder = tmp_path_factory.mktemp("smollm2")
    subprocess.run([PYTHON, "-c", SAVE_TOKENIZER, folder], check=True, timeout=PATIENCE)
    return folder


def _read_all(process: subprocess.Popen[str], urls: queue.Queue[str]) -> None:
    """Tell the URL, then an empty text at the end. A full pipe would stop the server."""
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            if line.startswith("url"):
                urls.put(line.split()[1])
    urls.put("")
