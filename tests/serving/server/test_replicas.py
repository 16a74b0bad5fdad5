"""A server of two engines: it tells of both, goes on with one, and ends when none is left."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from opgraft.errors import EngineError
from support.servers import processes_of_model, serving, until


def test_two_engines_behind_one_server(checkpoint: Path) -> None:
    """Both answer, with metrics of their own; a stream of a lost one goes on; with the last one the server ends."""
    with serving(
        checkpoint, "--parallel.data", "2", "--parallel.on_replica_loss", "move"
    ) as server:
        assert server.get("/health").json()["status"] == "ready"
        assert [each["engine"] for each in server.get("/v1/decisions").json()["engines"]] == [0, 1]
        long = {"max_tokens": 400, "ignore_eos": True}
        expected = server.complete(**long).json()["choices"][0]["text"]
        asked = [server.later(lambda: server.complete(**long)) for _ in range(4)]
        until(lambda: server.metric("num_requests_running") >= 4)
        found = re.findall(
            r'opgraft:num_requests_running\{engine="(\d)".*\} (.*)', server.get("/metrics").text
        )
        assert {engine for engine, running in found if float(running)} == {"0", "1"}
        first, second = processes_of_model(server)
        os.kill(first, signal.SIGKILL)
        answers = [each.result() for each in asked]
        assert [answer.json()["choices"][0]["text"] for answer in answers] == [expected] * 4
        until(lambda: server.get("/health").json()["status"] == "degraded")
        assert sorted(each["status"] for each in server.get("/health").json()["engines"]) == [
            "lost",
            "ready",
        ]
        assert server.complete().status_code == 200
        os.kill(second, signal.SIGKILL)
        assert server.process.wait(60) == EngineError.exit_code
