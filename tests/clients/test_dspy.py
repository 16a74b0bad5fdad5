"""DSPy, over litellm."""

from __future__ import annotations

from typing import Literal

import dspy
from support.client_questions import CALL_TOKENS, MODEL, TEXT, TOKENS


class Kind(dspy.Signature):
    """Tell the kind of a pet."""

    pet: str = dspy.InputField()
    kind: Literal["cat", "dog"] = dspy.OutputField()


def model(base_url: str, tokens: int) -> dspy.LM:
    return dspy.LM(
        f"openai/{MODEL}",
        api_base=base_url,
        api_key="none",
        temperature=0,
        max_tokens=tokens,
        num_retries=0,
        cache=False,
    )


def test_two_turns(base_url: str) -> None:
    """A second answer comes after a history."""
    chat = model(base_url, TOKENS)
    messages = [{"role": "user", "content": TEXT}]
    (first,) = chat(messages=messages)
    text = first if isinstance(first, str) else first["text"]
    messages += [
        {"role": "assistant", "content": text},
        {"role": "user", "content": "And in Rome?"},
    ]
    assert chat(messages=messages)


def test_structured_output(base_url: str) -> None:
    """The adapter for JSON gets the fields of a signature."""
    with dspy.context(lm=model(base_url, CALL_TOKENS), adapter=dspy.JSONAdapter()):
        assert dspy.Predict(Kind)(pet="It barks.").kind in ("cat", "dog")
