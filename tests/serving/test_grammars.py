"""Grammars that a model was asked for are kept, within bounds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from opgraft import SamplingParams
from opgraft.serving import grammars

pytest.importorskip("llguidance")


def test_those_that_were_used_last_are_kept(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as their specs have few characters together; one that is kept is not compiled again."""
    monkeypatch.setattr(grammars, "_MOST_CHARACTERS", 100)
    tokenizer: Any = SimpleNamespace(backend=trained)
    kept = grammars.Grammars(tokenizer, 400, frozenset({0}))
    first, second, third = (SamplingParams(structured_output={"choice": [letter * 30]}) for letter in "abc")
    compiled = kept.of(first)
    kept.compile_safely(second)
    assert kept.of(first) is compiled
    kept.of(third)
    assert [kept.find(params) is not None for params in (first, second, third)] == [True, False, True]
