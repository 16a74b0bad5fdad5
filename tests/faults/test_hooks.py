"""Plugins that are wrong when they are loaded: each is told by name, taken back, and no other one's matter."""

from __future__ import annotations

import logging
import time

import opgraft
import pytest
from opgraft.base.text import printable
from opgraft.plugins.outcomes import findings_of
from opgraft.registry.state import host_state
from support.faults.hook_rows import ROWS
from support.faults.planting import TooSlowError, in_time, others_are_as_they_were

pytestmark = pytest.mark.faults

LONGEST = 4000  # characters of a message that anybody reads


@pytest.mark.parametrize("name", ROWS)
def test_hooks(site, caplog, alone, name: str) -> None:
    """The reason, or a finding, says what was wrong; nothing that a plugin says moves a terminal or fills it."""
    source, status, words = ROWS[name]
    site.plugin("acme", source)
    opgraft.reset()
    with caplog.at_level(logging.WARNING, logger="opgraft"), in_time():
        others_are_as_they_were(alone)
    record = host_state().plugins["acme"]
    found = [str(finding) for finding in findings_of(record)]
    assert record.status.value == status, record.reason
    assert words in " ".join([record.reason, *found])
    assert bool(found) == (status != "activated" or bool(words)), found
    assert [said for said in caplog.messages if printable(said) != said] == []
    assert [said[:LONGEST] for said in (*found, *caplog.messages) if len(said) > LONGEST] == []
    if status != "activated":
        assert not any(replacement.plugin == "acme" for replacement in host_state().active)


def test_a_hang_is_told_though_its_end_is_caught() -> None:
    """The host catches what plugins raise, and a hang that goes on after that is ended too."""
    ended = []

    def hang_twice() -> None:
        for _ in range(2):
            try:
                time.sleep(30)
            except TooSlowError as error:
                ended.append(error)

    with pytest.raises(TooSlowError, match="no answer within"), in_time(0.02):
        hang_twice()
    assert len(ended) == 2
