"""instructor, in its modes for tools and for JSON schemas."""

from __future__ import annotations

from typing import Any

import instructor
import openai
import pytest
from support.client_questions import CALL_TOKENS, MODEL, NEXT, QUESTION, Pet

GIVEN: dict[str, Any] = {
    "model": MODEL,
    "temperature": 0,
    "max_tokens": CALL_TOKENS,
    "max_retries": 0,
}
MODES = (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_two_turns_of_objects(base_url: str, mode: instructor.Mode) -> None:
    """Each answer is an object, by a call or by a form, and goes back as text."""
    client = instructor.from_openai(openai.OpenAI(base_url=base_url, api_key="none"), mode=mode)
    messages: list[Any] = [QUESTION]
    first = client.create(messages=messages, response_model=Pet, **GIVEN)
    messages += [{"role": "assistant", "content": first.model_dump_json()}, NEXT]
    assert isinstance(client.create(messages=messages, response_model=Pet, **GIVEN), Pet)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_streams(base_url: str, mode: instructor.Mode) -> None:
    """A streamed object grows to a whole one."""
    client = instructor.from_openai(openai.OpenAI(base_url=base_url, api_key="none"), mode=mode)
    parts = list(client.create_partial(messages=[QUESTION], response_model=Pet, **GIVEN))
    assert parts[-1].kind in ("cat", "dog")
