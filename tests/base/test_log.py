"""``OPGRAFT_LOG``: what is decided, and each first fallback, on stderr."""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import opgraft
import pytest
import torch
from opgraft import functional
from opgraft.ops import RMSNorm, SiluAndMul
from opgraft.registry.state import host_state

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
    return subprocess.run(
        command, env=environ, cwd=tmp_path, capture_output=True, text=True
    ).stderr.splitlines()


def test_debug_shows_platform_plugins_bindings_and_each_first_fallback(
    tmp_path: Path, warm_python: str
) -> None:
    """At debug there is a line for each of them, for three equal fallbacks one; at info one that tells of all."""
    lines = run(warm_python, tmp_path, "debug")
    for start in ("DEBUG: platform: ", "INFO: opgraft ", "DEBUG: op rms_norm: Fast.forward_oot"):
        assert len([line for line in lines if line.startswith(f"opgraft {start}")]) == 1, lines
    (fallback,) = [line for line in lines if "gives way" in line]
    assert fallback.startswith(
        "opgraft DEBUG: Fast.forward_oot gives way to the native definition for the first time"
    )
    assert fallback.endswith("a gradient is required, and it has no backward")
    (line,) = run(warm_python, tmp_path, "info")
    assert line.startswith(f"opgraft INFO: opgraft {opgraft.__version__} on platform cpu: 0 of ")
    assert line.endswith("installed plugins active; 1 replacements")
    assert run(warm_python, tmp_path, "error") == []


def test_functional_forms_log_their_fallback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
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


class Kept(logging.Handler):
    """Keeps what it is given, as an exporter of OpenTelemetry would: the record's own fields beside its message."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    """A handler of everything that opgraft logs at the level that its variable sets."""
    monkeypatch.setenv("OPGRAFT_LOG", "debug")
    opgraft.reset()
    handler, logger = Kept(), logging.getLogger("opgraft")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


ACME = """
from opgraft.ops import RMSNorm
platforms = "any"
@RMSNorm.register_oot
class AcmeRMSNorm(RMSNorm):
    def forward_oot(self, x, residual=None):
        return x
"""


def test_a_start_with_plugins_is_one_line_at_info(site, kept: Kept) -> None:
    """It says platform, plugins and counts, in words and in fields; all else is DEBUG, or the warning of a failure."""
    site.plugin("acme", ACME, version="3.2")
    site.plugin("brix", "raise OSError('no driver')")
    RMSNorm(8)(torch.ones(2, 8))
    (line,) = [record for record in kept.records if record.levelno == logging.INFO]
    words = "1 of 2 installed plugins active: acme; 1 replacements"
    assert line.getMessage() == f"opgraft {opgraft.__version__} on platform cpu: {words}"
    assert {name: value for name, value in vars(line).items() if "." in name} == {
        "event.name": "opgraft.started",
        "opgraft.version": opgraft.__version__,
        "opgraft.platform": "cpu",
        "opgraft.plugins.installed": 2,
        "opgraft.plugins.active": ["acme"],
        "opgraft.plugins.failed": 1,
        "opgraft.replacements": 1,
    }
    others = {record.levelname for record in kept.records} - {"INFO"}
    assert others == {"DEBUG", "WARNING"}


def test_fields_are_of_types_that_exporters_take(site, kept: Kept) -> None:
    """Decisions, plugins and what runs have theirs, each a word, a number or a list of words, and nothing else."""
    site.plugin("acme", ACME, version="3.2")
    site.plugin("brix", "raise OSError('no \\x1b driver')")
    RMSNorm(8)
    plain = set(vars(logging.makeLogRecord({}))) | {"message"}
    fields = [{n: v for n, v in vars(record).items() if n not in plain} for record in kept.records]
    for name, value in (item for each in fields for item in each.items()):
        words = value if isinstance(value, list) else [value]
        assert "." in name
        assert all(isinstance(word, (str, int)) for word in words), (name, value)
        assert str(value).isprintable()
    failed = {
        "opgraft.plugin.name": "brix",
        "opgraft.plugin.status": "failed",
        "opgraft.provider.name": "brix",
        "opgraft.provider.version": "1.0",
    }
    assert failed in fields
    chosen = {
        each["opgraft.decision.subject"]: each["opgraft.decision.chosen"]
        for each in fields
        if len(each) == 3
    }
    assert (chosen["platform"], chosen["op rms_norm"]) == ("cpu", "AcmeRMSNorm.forward_oot")


def test_lines_of_json_have_the_fields(tmp_path: Path, warm_python: str) -> None:
    """A program that logs as JSON gets the fields beside the message."""
    program = "from opgraft.base.log import write_json; write_json(); import opgraft; opgraft.load_plugins()"
    environ = {**os.environ, "OPGRAFT_LOG": "info", "OPGRAFT_PLUGINS": ""}
    ran = subprocess.run(
        [warm_python, "-c", program], env=environ, cwd=tmp_path, capture_output=True, text=True
    )
    line = json.loads(ran.stderr)
    assert line["event.name"] == "opgraft.started"
    assert line["opgraft.platform"] in line["message"]
