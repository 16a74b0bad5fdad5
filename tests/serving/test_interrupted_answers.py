"""A second interrupt anywhere while prompts are answered: the model goes on with the next ones as if nothing was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from opgraft import SamplingParams
from support.engines import expect_empty
from support.interrupting import InterruptAt
from support.small_models import open_llm, write_model

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
FILES = ("serving/llm.py", "serving/replicas.py", "serving/engine_thread.py")
PROMPTS = [[9, 8, 7], [5, 6]]


@pytest.fixture(scope="module")
def folder(trained: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("interrupted") / "model", trained)


def test_a_second_interrupt_at_any_line(folder: Path) -> None:
    """The next prompts have their tokens and texts, and nothing is held of those before."""
    llm = open_llm(folder)
    engine = llm.engine
    right = [output.outputs for output in llm.generate(PROMPTS, GREEDY)]
    number, interrupted = 1, True
    while interrupted:
        interrupted = False
        try:
            with InterruptAt(number, FILES):
                llm.generate(PROMPTS, GREEDY, progress=False)
        except KeyboardInterrupt:
            interrupted = True
        assert [output.outputs for output in llm.generate(PROMPTS, GREEDY)] == right
        assert not any((engine._open, engine._owner, engine.core.has_work))
        expect_empty(engine.core)
        number += 1 + number // 8
    assert number > 50
