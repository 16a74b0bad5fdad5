"""One server of SmolLM2 for all clients. ``make test-clients`` runs these tests.

The clients have an environment of their own, without opgraft. The server runs in that of opgraft.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PYTHON = REPOSITORY / ".venv" / "bin" / "python"
COMMAND = ("-m", "opgraft", "serve", "smollm2", "--port", "0")

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
    assert process.stdout is not None
    try:
        urls = [line.split()[1] for line in _up_to_url(process.stdout)]
        assert urls, "the server did not start"
        yield urls[-1].removesuffix("/v1")
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


@pytest.fixture(scope="session")
def base_url(server: str) -> str:
    """The URL that users give to clients."""
    return f"{server}/v1"


def _up_to_url(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        if line.startswith("url"):
            yield line
            return
