"""Metadata that is wrong in every way that files can be: read in time, told by distribution, nobody else's matter."""

from __future__ import annotations

import pytest
from support.faults.metadata_rows import ROWS
from support.faults.planting import doctor_finds, tried

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("name", ROWS)
def test_metadata(site, capsys, alone, name: str) -> None:
    """What is wrong stands in 'opgraft plugins list' and is found by the doctor; without a fault, nothing is."""
    fault = ROWS[name]
    listed = tried(site, capsys, alone, fault)
    told = [
        line
        for line in listed.splitlines()
        if "acme" in line and ("ignored" in line or "rejected" in line)
    ]
    findings = doctor_finds()
    assert bool(findings) == (bool(fault.words) or fault.status == "failed"), findings
    for words in fault.words:
        assert any(words in line for line in told), listed
        assert any(words in line for line in findings), findings
    assert bool(told) == bool(fault.words), listed
