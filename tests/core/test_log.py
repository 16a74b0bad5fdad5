"""``OPGRAFT_LOG``: what is decided, and each first fallback, on stderr."""

from __future__ import annotations

import logging
import os
import subprocess
from pathlib import Path

import opgraft
import pytest
import torch
from opgraft import functional
from opgraft.ops import SiluAndMul
from opgraft.state import host_state

PROGRAM = """
import torch, opgraft
from opgraft.ops import RMSNorm
class Fast(RMSNorm):
    @opgraft.inference_only
    def forward_oot(self, x, residual=None):
        return x
RMSNorm.register_oot(Fast)
op = RMSNorm(8)
for _ in range(3):
    op(torch.ones(2, 8, requires_grad=True))
"""


def run(python: str, tmp_path: Path, level: str) -> list[str]:
    environ = {**os.environ, "OPGRAFT_LOG": level, "OPGRAFT_PLUGINS": ""}
    command = [python, "-c", PROGRAM]
    return subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True).stderr.splitlines()


def test_debug_shows_platform_plugins_bindings_and_each_first_fallback(tmp_path: Path, warm_python: str) -> None:
    """At debug there is a line for each of them, for three equal fallbacks one; at info the first two only."""
    lines = run(warm_python, tmp_path, "debug")
    for start, count in (("INFO: platform: ", 1), ("INFO: plugins: ", 1), ("DEBUG: op rms_norm: Fast.forward_oot", 1)):
        assert len([line for line in lines if line.startswith(f"opgraft {start}")]) == count, lines
    (fallback,) = [line for line in lines if "gives way" in line]
    assert fallback.startswith("opgraft DEBUG: Fast.forward_oot gives way to the native definition for the first time")
    assert fallback.endswith("a gradient is required, and it has no backward")
    assert {line.split()[1] for line in run(warm_python, tmp_path, "info")} == {"INFO:"}
    assert run(warm_python, tmp_path, "error") == []


def test_functional_forms_log_their_fallback(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The function that gave way is named; a call without a gradient logs nothing."""

    def fast(x: torch.Tensor) -> torch.Tensor:
        return functional.silu_and_mul.native(x)

    class Fast(SiluAndMul):
        functional_oot = {"silu_and_mul": fast}  # noqa: RUF012  # as plugins write it

        @opgraft.inference_only
        def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
            return fast(x)

    SiluAndMul.register_oot(Fast)
    monkeypatch.setenv("OPGRAFT_LOG", "debug")
    opgraft.current_platform()
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "opgraft"):
        functional.silu_and_mul(torch.ones(2, 8))
        assert not [m for m in caplog.messages if "gives way" in m]
        for _ in range(2):
            functional.silu_and_mul(torch.ones(2, 8, requires_grad=True))
    (fallback,) = [m for m in caplog.messages if "gives way" in m]
    assert "fast gives way to the native definition" in fallback


def test_logging_does_not_break_a_compiled_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the log on, a kernel that gives way to its native definition still compiles without a graph break."""

    class Fast(SiluAndMul):
        @opgraft.inference_only
        def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
            return x

    SiluAndMul.register_oot(Fast)
    monkeypatch.setenv("OPGRAFT_LOG", "debug")
    op = SiluAndMul()
    x = torch.randn(2, 8, requires_grad=True)
    compiled = torch.compile(op, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), op.forward_native(x))


def test_the_level_goes_with_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a reset without the variable the logger is as before, with no handler of ours."""
    monkeypatch.setenv("OPGRAFT_LOG", "debug")
    opgraft.reset()
    host_state().settings()
    logger = logging.getLogger("opgraft")
    assert logger.level == logging.DEBUG
    monkeypatch.delenv("OPGRAFT_LOG")
    opgraft.reset()
    host_state().settings()
    assert (logger.level, logger.handlers) == (logging.NOTSET, [])
