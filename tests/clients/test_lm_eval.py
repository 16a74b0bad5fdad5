"""EleutherAI's evaluation harness, with the server's own tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from support.client_questions import MODEL

TEXTS = ("The capital of France is", "Two and two")


@pytest.fixture
def model(base_url: str) -> LocalCompletionsAPI:
    return LocalCompletionsAPI(
        base_url=f"{base_url}/completions",
        model=MODEL,
        tokenizer_backend="remote",
        max_length=512,
        max_gen_toks=8,
        max_retries=1,
    )


def instances(kind: str, *arguments: Any) -> list[Instance]:
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


def test_log_probabilities(model: LocalCompletionsAPI) -> None:
    """A likely continuation has a greater log-probability than an unlikely one."""
    likely, unlikely = model.loglikelihood(
        instances("loglikelihood", (TEXTS[0], " Paris"), (TEXTS[0], " cucumber"))
    )
    assert unlikely[0] < likely[0] < 0


def test_generates(model: LocalCompletionsAPI) -> None:
    """Each prompt gets a text, which stops where the harness asks for it."""
    asked = instances("generate_until", *((text, {"until": ["\n"]}) for text in TEXTS))
    answers = model.generate_until(asked)
    assert len(answers) == len(TEXTS)
    assert all("\n" not in answer for answer in answers)
