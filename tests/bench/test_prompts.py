"""Prompts and arrivals are what was asked for, and the same again for the same seed."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from opgraft.bench.prompts import Prompt, arrivals, random_prompts, read_prompts
from opgraft.errors import InputError


def test_random_prompts_repeat_with_their_seed() -> None:
    """A seed gives the same prompts, another one others; no two begin alike."""
    prompts = random_prompts(50, 20, seed=1)
    assert prompts == random_prompts(50, 20, seed=1)
    assert prompts != random_prompts(50, 20, seed=2)
    assert {len(str(prompt.content).split()) for prompt in prompts} == {20}
    assert len({str(prompt.content)[:40] for prompt in prompts}) == 50


def test_constant_arrivals_are_evenly_spaced() -> None:
    """The first request is sent at once, the others at the rate."""
    assert arrivals(4, 2.0, False, 0) == [0.0, 0.5, 1.0, 1.5]


def test_poisson_arrivals_have_the_rate_and_its_spread() -> None:
    """Gaps of a Poisson process have a standard deviation as large as their mean."""
    times = arrivals(20_001, 5.0, True, 3)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(0.2, rel=0.05)
    assert spread == pytest.approx(0.2, rel=0.05)
    assert times == arrivals(20_001, 5.0, True, 3)


def test_a_file_of_lines_is_prompts_again_and_again(tmp_path: Path) -> None:
    """Each line that is not empty is a prompt; a file that is too short starts over."""
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo\n")
    assert [prompt.content for prompt in read_prompts(file, 3)] == ["one", "two", "one"]


def test_a_file_of_json_has_texts_and_chats(tmp_path: Path) -> None:
    """A line is a string, or an object with a prompt or messages."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '"one"\n{"prompt": "two", "max_tokens": 3}\n{"messages": [{"role": "user", "content": "x"}]}\n'
    )
    one, two, chat = read_prompts(file, 3)
    assert (one, two) == (Prompt("one"), Prompt("two", 3))
    assert two.body(chat=True) == {"messages": [{"role": "user", "content": "two"}]}
    assert two.body(chat=False) == {"prompt": "two"}
    assert chat.body(chat=True) == {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "line 1 of .* is no JSON"),
        ("3", "line 1 of .* is no prompt"),
        ('{"text": "x"}', "is no prompt"),
        ('{"messages": "x"}', "is no prompt"),
        ('{"prompt": "x", "max_tokens": true}', "max_tokens that are no count"),
        ("", "has no prompts"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str, why: str) -> None:
    """A bad file is an error that says where and why."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(InputError, match=why):
        read_prompts(file, 1)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """A missing file is an error, not a traceback."""
    with pytest.raises(InputError, match="cannot be read"):
        read_prompts(tmp_path / "none.txt", 1)
