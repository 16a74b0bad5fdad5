"""Tables for terminals."""

from __future__ import annotations

from opgraft.text import table


def test_columns_are_aligned_and_fit() -> None:
    """Every line fits the width, cells that give way go on below, and nothing is lost."""
    rows = [("name", "text"), ("a", "one two three four five six"), ("long name here", "x")]
    lines = table(rows, 24)
    assert max(len(line) for line in lines) <= 24
    assert lines[0].split() == ["name", "text"]
    assert " ".join(lines).split().count("three") == 1
    assert table(rows)[2].startswith("long name here")
