"""Tasks on several processes, and the comparison of tokens, which the parts of ``tools/on_gpu.sh`` are made of."""

from __future__ import annotations

import re

import pytest
from on_gpu.pool import run_all
from on_gpu.tokens import compared

TASKS = {
    "1 + 1": (2, ""),
    "2 + 2": (4, ""),
    "__import__('time').sleep(600)": (None, "took more than 2 seconds"),
    "1 / 0": (None, "ZeroDivisionError: division by zero"),
    "__import__('os')._exit(3)": (None, "its process ended with 3"),
    "3 + 3": (6, ""),
}
"""What hangs is no process's first task, which would have the time of a start on top."""


def test_a_task_takes_no_other_down() -> None:
    """A task that raises, ends its process or hangs has an error, and the others have a value."""
    tasks = [(text,) for text in TASKS]
    done = {each.arguments[0]: each for each in run_all(eval, tasks, 2, 2.0, 60.0)}
    assert {text: (each.value, each.error) for text, each in done.items()} == TASKS


def test_tokens_may_part_at_a_tie() -> None:
    """Other tokens are no error from a place on where the margin is tiny; the text says where."""
    expected, margins = [[1, 2, 3], [4, 5, 6]], [[1.0, 1.0, 1.0], [1.0, 1e-5, 1.0]]
    assert compared(expected, expected, margins, 1e-3) == "2 of 2 answers are equal"
    told = compared([[1, 2, 3], [4, 9, 9]], expected, margins, 1e-3)
    assert told == (
        "1 of 2 answers are equal; answer 1 parts at token 1, where the margin is 1.0e-05"
    )


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([[1, 2, 9], [4, 5, 6]], "answer 0 parts at token 2, where the margin is 1.0e+00"),
        ([[1, 2, 3], [4, 5]], "answer 1 has 2 tokens, expected 3"),
    ],
)
def test_other_tokens_are_errors(found: list[list[int]], message: str) -> None:
    """Another token where the expected one is far likelier is an error, and so is an answer of another length."""
    margins = [[1.0, 1.0, 1.0], [1.0, 1e-5, 1.0]]
    with pytest.raises(AssertionError, match=re.escape(message)):
        compared(found, [[1, 2, 3], [4, 5, 6]], margins, 1e-3)
