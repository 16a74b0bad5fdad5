"""A fault in one plugin changes nothing for another: neither what is bound, nor why, nor a bit of a result."""

from __future__ import annotations

import logging

import opgraft
import pytest
from faults.doctor_rows import FINDINGS
from faults.planting import in_time, others_are_as_they_were
from faults.process_rows import IMPORTS, PLUGIN, SET_BACK

SOURCES = {kind: source for kind, (source, _, _) in FINDINGS.items()} | {
    change: f"{IMPORTS}{change}{PLUGIN.format('pass')}" for change in SET_BACK
}
"""Faults of the plugin acme; rows of other tables have tests of their own that look at its neighbour, too."""


@pytest.mark.parametrize("name", SOURCES)
def test_neighbours(site, alone, monkeypatch: pytest.MonkeyPatch, caplog, name: str) -> None:
    """Whichever of the two is loaded first."""
    monkeypatch.setenv("TAKEN", "as it was")
    for plugin in ("acme", "cedar"):
        site.plugin(plugin, SOURCES[name])
    opgraft.reset()
    with caplog.at_level(logging.WARNING, logger="opgraft"), in_time():
        others_are_as_they_were(alone)
