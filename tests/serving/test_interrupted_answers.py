"""A second interrupt anywhere while prompts are answered: the model goes on with the next ones as if nothing was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine.engines import expect_empty
from engine.interrupting import InterruptAt
from opgraft import SamplingParams
from serving.small_models import open_llm, write_model

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
FILES = ("serving/text_engine.py", "serving/llm.py", "engine/engine_core.py")
PROMPTS = [[9, 8, 7], [5, 6]]


@pytest.fixture(scope="module")
def folder(trained: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("interrupted") / "model", trained)


def test_a_second_interrupt_at_any_line(folder: Path) -> None:
    """Another's stream is whole or aborted, the next prompts have their tokens and texts, and nothing is held."""
    llm = open_llm(folder)
    engine = llm.engine
    right = [output.outputs for output in llm.generate(PROMPTS, GREEDY)]
    (alone,) = llm.generate(
        [[3, 4, 5]], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    )
    number, interrupted = 1, True
    while interrupted:
        other = engine.add(
            "other", [3, 4, 5], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
        )
        engine.step()
        interrupted = False
        try:
            with InterruptAt(number, FILES):
                llm.generate(PROMPTS, GREEDY, progress=False)
        except KeyboardInterrupt:
            interrupted = True
        assert [output.outputs for output in llm.generate(PROMPTS, GREEDY)] == right
        assert not any((engine._open, engine._owner, engine.core.has_work))
        expect_empty(engine.core)
        assert other.finished
        (answer,) = other.outputs
        if answer.finish_reason == "abort":
            assert alone.outputs[0].token_ids[: len(answer.token_ids)] == answer.token_ids
        else:
            assert other.outputs == alone.outputs
        number += 1 + number // 30
    assert number > 100
