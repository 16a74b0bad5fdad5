"""Distributions that are in each other's way, finders that fail, and things on the path that are none."""

from __future__ import annotations

import sys

import opgraft
import pytest
from support.faults.distribution_rows import ROWS
from support.faults.planting import (
    answer,
    doctor_finds,
    in_time,
    others_are_as_they_were,
    status_of,
)


@pytest.mark.parametrize("name", ROWS)
def test_distributions(site, capsys, alone, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What is wrong is told in one line that names who it is, by the doctor too; what is in order is found."""
    plant, words, status = ROWS[name]
    plant(site, monkeypatch)
    try:
        opgraft.reset()
        with in_time():
            code, listed = answer(capsys, "plugins", "list")
            others_are_as_they_were(alone)
        assert (code, status_of("acme")) == (0, status)
        told = [line for line in listed.splitlines() if line.startswith("ignored: ")]
        assert bool(told) == bool(words), listed
        findings = doctor_finds()
        assert bool(findings) == bool(words), findings
        for part in words:
            assert any(part in line for line in told), listed
            assert any(part in line for line in findings), findings
    finally:
        sys.modules.pop("acme", None)
