"""Prompts become token ids, or errors that say what is wrong and where."""

from __future__ import annotations

from typing import Any

import pytest
from opgraft.errors import RequestError
from opgraft.serving.prompts import tokenized
from opgraft.serving.tokenizer import open_tokenizer

LIMITS = {"vocab_size": 49152, "max_model_len": 8}


@pytest.mark.parametrize(
    ("prompt", "text", "ids"),
    [
        ("a b", "a b", [81, 278]),
        ([81, 278], None, [81, 278]),
        ((81,), None, [81]),
        ({"prompt_token_ids": [0, 49151]}, None, [0, 49151]),
        ([1] * 7, None, [1] * 7),
    ],
)
def test_prompts(smollm2, prompt: Any, text: str | None, ids: list[int]) -> None:
    """Text keeps its text, and token ids are taken as they are."""
    assert tokenized(prompt, smollm2, **LIMITS) == (text, ids)


def test_special_tokens(write_gguf) -> None:
    """A text begins with its special token unless a template has written it."""
    from opgraft.models.files import open_weights

    tokenizer = open_tokenizer(open_weights(write_gguf("gpt-2", bos=True)))
    begin = tokenizer.backend.token_to_id("<|im_start|>")
    (_, usual), (_, bare) = (
        tokenized("a", tokenizer, vocab_size=500, max_model_len=9, add_special_tokens=special)
        for special in (True, False)
    )
    assert usual == [begin, *bare]
    cut = {"vocab_size": 500, "max_model_len": 9, "keep_last": 3}
    _, all_ids = tokenized("a b c d", tokenizer, vocab_size=500, max_model_len=99)
    assert len(all_ids) > 3
    assert tokenized("a b c d", tokenizer, **cut)[1] == [begin, *all_ids[-2:]]
    _, of_chat = tokenized("a b c d", tokenizer, **cut, add_special_tokens=False)
    assert of_chat == all_ids[-3:]


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("", "prompts[3] has no tokens: give some text"),
        ([], "prompts[3] has no tokens"),
        ({"prompt_token_ids": []}, "prompts[3] has no tokens"),
        (
            [1] * 8,
            "prompts[3] has 8 tokens and needs room for 1 more, and this model's maximum context length is 8 tokens: "
            "shorten it by 1 token, ",
        ),
        ("word " * 50, "and this model's maximum context length is 8 tokens: shorten it by"),
        (
            [1, -1],
            "prompts[3] has the token id -1 at place 1, and the vocabulary has 49152 (0 to 49151)",
        ),
        ([1, 2, 49152], "the token id 49152 at place 2"),
        ([1, "2"], "has '2' at place 1, which is no token id"),
        ([1, True], "has True at place 1, which is no token id"),
        ([1.0], "has 1.0 at place 0, which is no token id"),
        ("ab\ud800c", r"prompts[3] has half a surrogate pair, '\ud800', at character 2"),
        (b"ab", "prompts[3] is bytes: give text, a list of token ids"),
        (None, "prompts[3] is NoneType: give text"),
        (
            {"text": "x"},
            "prompts[3] has the keys 'text': give either 'prompt' or 'prompt_token_ids', and ",
        ),
        ({}, "prompts[3] has the keys none"),
        (
            {"prompt_token_ids": "12"},
            "prompts[3] has 'prompt_token_ids' of the type str: give a list of token ids",
        ),
    ],
)
def test_prompts_that_are_refused(smollm2, prompt: Any, reason: str) -> None:
    """Each error says which prompt, what is wrong, where, and what to do."""
    with pytest.raises(RequestError) as caught:
        tokenized(prompt, smollm2, name="prompts[3]", **LIMITS)
    assert reason in str(caught.value)
    assert ": " in str(caught.value), "it says what to do next"


def test_an_encoder_needs_no_room(smollm2) -> None:
    """A text that is only embedded may fill the model's context."""
    assert len(tokenized([1] * 8, smollm2, room=0, **LIMITS)[1]) == 8
