"""The table at the end of ``make test-families``: what was built, grafted and agreed, and what was not, and why."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch

SECONDS = 90
"""After which a family is given up, as one that was not made small enough."""


@pytest.fixture(autouse=True)
def limited(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a family that takes too long, and compute on one thread, as two processes share the machine."""

    def stop(number: int, frame: FrameType | None) -> None:
        pytest.fail(f"took more than {SECONDS} s", pytrace=False)

    torch.set_num_threads(1)
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how many families were built, grafted and agreed, the ops that they got, and why others were not run."""
    reports = {
        outcome: [
            r
            for r in terminalreporter.stats.get(outcome, ())
            if "test_family[" in getattr(r, "nodeid", "")
        ]
        for outcome in ("passed", "failed", "skipped")
    }
    if not any(reports.values()):
        return
    ran = [dict(report.user_properties) for report in reports["passed"] + reports["failed"]]
    ops = [json.loads(properties["ops"]) for properties in ran if "ops" in properties]
    rows = [
        ("families", sum(map(len, reports.values()))),
        ("built and run plainly", len(ran)),
        ("grafted, with at least one op", sum(map(bool, ops))),
        ("agreed in everything", len(reports["passed"])),
        ("did not", len(reports["failed"])),
        ("not built or not run", len(reports["skipped"])),
    ]
    write = terminalreporter.write_line
    terminalreporter.section("families of transformers")
    for what, number in rows:
        write(f"{number:6}  {what}")
    modules: Counter[str] = sum((Counter(found) for found in ops), Counter())
    write("")
    write("modules families  op")
    for op, number in modules.most_common():
        write(f"{number:7} {sum(op in found for found in ops):8}  {op}")
    write("")
    write("Not built or not run:")
    for report in sorted(reports["skipped"], key=lambda report: report.nodeid):
        family = report.nodeid.partition("[")[2].rstrip("]")
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        write(f"  {family}: {reason.removeprefix('Skipped: ')}"[:160])
