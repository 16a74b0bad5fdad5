"""Trouble in the process of the model, as a plugin brings it there: the server that ships has one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.servers import Server, error_of, expect_idle, process_of_model, serving, until

PLUGIN = Path(__file__).parents[2] / "support" / "troubled_plugin.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where trouble is asked for, beside the distribution of the plugin."""
    made = tmp_path_factory.mktemp("trouble")
    info = made / "troubled-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: troubled\nVersion: 1.0\nRequires-Dist: opgraft\n"
    )
    (info / "entry_points.txt").write_text("[opgraft.plugins]\ntroubled = troubled\n")
    (made / "troubled.py").write_text(PLUGIN.read_text())
    return made


@pytest.fixture(scope="module")
def troubled(checkpoint: Path, folder: Path) -> Iterator[Server]:
    """A server with that plugin, whose model is in a process of its own."""
    variables = {"PYTHONPATH": str(folder), "TROUBLE": str(folder), "OPGRAFT_PLUGINS": "troubled"}
    with serving(checkpoint, variables=variables) as running:
        yield running


def schema(answer: str) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": answer}}}


def test_a_kernel_that_fails_fails_its_requests_alone(troubled: Server, folder: Path) -> None:
    """They get an error without the cause, which is in the log; the next request is answered by the same worker."""
    expected = troubled.complete(max_tokens=3).json()["choices"]
    worker = process_of_model(troubled)
    (folder / "fail").touch()
    whole = troubled.complete(max_tokens=3)
    streamed = troubled.complete(max_tokens=3, stream=True)
    (folder / "fail").unlink()
    assert (whole.status_code, error_of(whole)["code"]) == (500, "failed")
    assert "failed" in streamed.text
    for answer in (whole, streamed):
        assert "secret" not in answer.text
        assert "kernel trouble" in troubled.logged(answer)["cause"]
    assert troubled.complete(max_tokens=3).json()["choices"] == expected
    assert process_of_model(troubled) == worker
    expect_idle(troubled)


def test_nobody_waits_for_a_slow_schema_of_another(troubled: Server, folder: Path) -> None:
    """While it is compiled in the server and then in the worker, others are answered, with and without a schema."""
    known = schema("yes")
    assert troubled.chat(response_format=known).status_code == 200
    processes = (troubled.pid, process_of_model(troubled))
    slow = troubled.later(lambda: troubled.chat(response_format=schema("slow"), max_tokens=40))
    for process in processes:
        until((folder / str(process)).exists)
        assert (
            json.loads(
                troubled.chat(response_format=known).json()["choices"][0]["message"]["content"]
            )
            == "yes"
        )
        assert troubled.complete(max_tokens=3).status_code == 200
        assert not slow.done()
        os.remove(folder / str(process))
    assert json.loads(slow.result().json()["choices"][0]["message"]["content"]) == "slow"
    expect_idle(troubled)
