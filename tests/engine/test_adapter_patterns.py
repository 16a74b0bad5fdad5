"""Patterns of module names from the configs of adapters."""

from __future__ import annotations

import random
import re
import time

import pytest
from opgraft.engine.lora.patterns import LONGEST, NamePattern

PARTS = ["a", "b", ".", r"\.", ".*", r"\d", r"\d+", "[ab-]", "1", "^", "$", "(a|b.)", "(.*|1)", "|"]


def test_patterns_match_as_in_peft() -> None:
    """A pattern matches the names that the expression of PEFT matches."""
    draw = random.Random(7)  # noqa: S311  # no secret
    outcomes = []
    for _ in range(3000):
        pattern = "".join(draw.choices(PARTS, k=draw.randint(1, 6)))
        name = "".join(draw.choices("ab1.", k=draw.randint(1, 9)))
        expected = re.match(rf"(.*\.)?({pattern})$", name) is not None
        assert NamePattern(pattern).matches(name) == expected, (pattern, name)
        outcomes.append(expected)
    assert 300 < sum(outcomes) < 2700


@pytest.mark.parametrize("pattern", ["(.|.)" * 50 + "x", r"\d+" * 90 + "x", ".*" * 140 + "x"])
def test_slow_patterns(pattern: str) -> None:
    """Patterns that take ``re`` for ever are matched at once."""
    started = time.perf_counter()
    assert not NamePattern(pattern).matches("1" * LONGEST)
    assert time.perf_counter() - started < 1


@pytest.mark.parametrize(
    "pattern", ["", "(", "a)", ")(", "a+", "(?=a)", "[b-a]", "a{9}", "a" * 301]
)
def test_patterns_that_are_not_read(pattern: str) -> None:
    """Other patterns are refused."""
    with pytest.raises(ValueError, match=r"it is not read|parentheses|no set"):
        NamePattern(pattern)
