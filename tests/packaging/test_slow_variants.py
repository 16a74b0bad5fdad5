"""The tables of slow variants name tests that are there, and no test is left out without one that stays."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from support.slow_variants import EVERY, HELD_BY, mark_slow

TESTS = Path(__file__).parents[1]


def missing(names: Iterable[str]) -> list[str]:
    """The files and tests that are not there."""
    return [name for name in names if not _is_there(name)]


def _is_there(name: str) -> bool:
    file, *names = name.split("::")
    path = TESTS / file
    if not path.is_file():
        return False
    text = path.read_text()
    defined = [f"class {each}" for each in names[:-1]] + [f"def {each}" for each in names[-1:]]
    return all(each in text for each in defined)


def test_rows_name_tests_that_are_there() -> None:
    """A test that was renamed would run with all of its variants, or lose the one that holds its claim."""
    assert missing([*EVERY, *HELD_BY, *HELD_BY.values()]) == []
    assert missing(["cli/test_run.py::test_nothing"]) == ["cli/test_run.py::test_nothing"]


def test_who_holds_a_claim_is_not_left_out() -> None:
    assert not HELD_BY.keys() & set(HELD_BY.values())


class Variant:
    """What pytest knows of a variant, as far as ``mark_slow`` asks."""

    def __init__(self, nodeid: str, slow: bool = False) -> None:
        self.nodeid, self.slow = nodeid, slow

    def get_closest_marker(self, name: str) -> bool:
        return self.slow

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        assert marker.name == "slow"
        self.slow = True


def test_each_third_variant_stays() -> None:
    """Others stay as they are; what its file marks is none of the three."""
    test = "tests/engine/test_compiled_step.py::test_the_tokens_are_those_of_the_modules"
    marked = Variant(f"{test}[gemma2]", slow=True)
    variants = [Variant(f"{test}[{number}]") for number in range(5)]
    other = Variant("tests/engine/test_compiled_step.py::test_without_a_compiler")
    items = [marked, *variants, other]
    mark_slow(items)  # type: ignore[arg-type]  # what pytest makes needs a session
    assert [each.slow for each in items] == [True, False, True, True, False, True, False]
