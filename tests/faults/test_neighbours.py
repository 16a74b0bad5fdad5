"""A fault in one plugin changes nothing for another: neither what is bound, nor why, nor a bit of a result."""

from __future__ import annotations

import logging

import opgraft
import pytest
from opgraft.plugins.outcomes import findings_of
from opgraft.registry.state import host_state
from support.faults.doctor_rows import FINDINGS
from support.faults.planting import in_time, others_are_as_they_were
from support.faults.process_rows import (
    IMPORTS,
    OF_BRIX,
    PLUGIN,
    SET_BACK,
    comparing,
)

SOURCES = {kind: source for kind, (source, _, _) in FINDINGS.items()} | {
    change: f"{IMPORTS}{change}{PLUGIN.format('pass')}" for change in SET_BACK
}
"""Faults of the plugin acme; rows of other tables have tests of their own that look at its neighbour, too."""


@pytest.mark.faults
@pytest.mark.parametrize("name", SOURCES)
def test_neighbours(site, alone, monkeypatch: pytest.MonkeyPatch, caplog, name: str) -> None:
    """Whichever of the two is loaded first."""
    monkeypatch.setenv("TAKEN", "as it was")
    for plugin in ("acme", "cedar"):
        site.plugin(plugin, SOURCES[name])
    opgraft.reset()
    with caplog.at_level(logging.WARNING, logger="opgraft"), in_time(), comparing(name):
        others_are_as_they_were(alone)


HARM = [
    (change, when)
    for change in OF_BRIX
    for when in ("while it was loaded", "in its hook opgraft_veto")
]


@pytest.mark.parametrize(("change", "when"), HARM)
def test_a_plugin_that_harms_another_one(site, alone, change: str, when: str) -> None:
    """Who does it is told, and nobody else, be that plugin loaded before the other one or behind it."""
    loading = when == "while it was loaded"
    source = (change, "pass") if loading else ("", change)
    for plugin in ("acme", "cedar"):
        site.plugin(plugin, f"{IMPORTS}{source[0]}{PLUGIN.format(source[1])}")
    opgraft.reset()
    with in_time():
        others_are_as_they_were(alone)
    records = host_state().plugins.values()
    told = {record.name: [*map(str, findings_of(record))] for record in records}
    assert told.pop("brix") == []
    for findings in told.values():
        assert findings
        for finding in findings:
            assert any(words in finding for words in OF_BRIX[change]), findings
            assert f"{when}: it was set back" in finding
