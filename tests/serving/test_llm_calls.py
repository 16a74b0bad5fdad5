"""Calls of one ``LLM`` that are refused half way, or come from several threads."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from opgraft import SamplingParams
from opgraft.errors import RequestError
from opgraft.serving.llm import LLM
from support.engines import add, expect_empty
from support.small_models import open_llm, write_model

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
PROMPT = [9, 8, 7, 6, 5]


@pytest.fixture(scope="module")
def folder(trained: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("calls") / "model", trained)


@pytest.fixture
def llm(folder: Path) -> LLM:
    return open_llm(folder)


def expect_nothing_held(llm: LLM) -> None:
    assert not any((llm.engine._open, llm.engine._owner, llm.engine.core.has_work))
    expect_empty(llm.engine.core)


def tokens(llm: LLM, *prompts: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(list(prompts), GREEDY)]


def test_calls_of_several_threads_take_turns(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread gets the answers to its own prompts, and no two are in the engine at once."""
    right = tokens(llm, PROMPT, [3, 4])
    step, inside, most = llm.engine.step, threading.Semaphore(1), []

    def alone() -> list[Any]:
        most.append(inside.acquire(blocking=False))
        time.sleep(0.002)
        try:
            return step()
        finally:
            inside.release()

    monkeypatch.setattr(llm.engine, "step", alone)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda prompt: tokens(llm, prompt), [PROMPT, [3, 4]] * 4))
    assert answers == [[each] for each in right] * 4
    assert all(most)
    expect_nothing_held(llm)


def test_refused_requests_do_not_count_as_ended(llm: LLM) -> None:
    """Of several completions of which one has an id that is in use, none was ever there."""
    before = llm.stats().counters.finished
    add(llm.engine, "x/1", PROMPT, GREEDY)
    with pytest.raises(RequestError, match="'x/1' is added, and one of that id runs"):
        add(llm.engine, "x", PROMPT, SamplingParams(n=3))
    assert llm.stats().counters.finished == before
    assert llm.stats().waiting == 1
    llm.engine.abort("x/1")
    expect_nothing_held(llm)
