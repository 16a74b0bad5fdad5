"""Tables for terminals."""

from __future__ import annotations

from opgraft.base.text import table


def test_columns_are_aligned_and_fit() -> None:
    """Every line fits the width, cells that give way go on below, and nothing is lost."""
    rows = [("name", "text"), ("a", "one two three four five six"), ("long name here", "x")]
    lines = table(rows, 24)
    assert max(len(line) for line in lines) <= 24
    assert lines[0].split() == ["name", "text"]
    assert " ".join(lines).split().count("three") == 1
    assert table(rows)[2].startswith("long name here")


def test_words_are_broken_only_where_nothing_else_would_fit() -> None:
    """A path stays whole while another column can give way; where none can, it is broken so that lines fit."""
    rows = [
        ("the first", "reason"),
        ("encoder.layer.0.attention.self-query", "one two three four five six"),
    ]
    for width in (60, 44):
        lines = table(rows, width)
        assert max(map(len, lines)) <= width
        assert any("encoder.layer.0.attention.self-query" in line for line in lines)
    narrow = table(rows, 20)
    assert max(map(len, narrow)) <= 20
    assert "six" in "".join(narrow)
