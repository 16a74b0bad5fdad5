"""Metadata that is wrong in every way that files can be: read in time, told by distribution, nobody else's matter."""

from __future__ import annotations

import pytest
from faults.metadata_rows import ROWS
from faults.planting import tried


@pytest.mark.parametrize("name", ROWS)
def test_metadata(site, capsys, alone, name: str) -> None:
    """What is wrong stands in 'opgraft plugins list', with the distribution that has it; without a fault, nothing."""
    fault = ROWS[name]
    listed = tried(site, capsys, alone, fault)
    told = [line for line in listed.splitlines() if "acme" in line and ("ignored" in line or "rejected" in line)]
    for words in fault.words:
        assert any(words in line for line in told), listed
    assert bool(told) == bool(fault.words), listed
