"""Sampling parameters are checked when they are made, and each error says what to use instead."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import pytest
from opgraft import SamplingParams
from opgraft.engine.request import Request
from opgraft.errors import RequestError

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "values", "allowed"),
    [
        (
            "n",
            [0, -1, True, 1.0, "1", None, 16_385, 10**9],
            "an integer of at least 1 and at most 16,384",
        ),
        (
            "temperature",
            [-1, NAN, INFINITY, 10**400, True, "hot", None],
            "0 for greedy decoding, or a number",
        ),
        ("top_k", [-2, True, 1.5], "an integer of at least 0, where 0 keeps every token"),
        ("top_p", [0, -0.1, 1.1, NAN, True, "1"], "a number above 0 and at most 1"),
        ("min_p", [-0.1, 1.1, NAN], "a number from 0 to 1"),
        ("presence_penalty", [-2.1, 2.1, NAN], "a number from -2 to 2"),
        ("frequency_penalty", [-2.1, 2.1, NAN], "a number from -2 to 2"),
        ("repetition_penalty", [0, -1, 1e-40, 1e308, NAN, INFINITY], "a number from 0.001 to 1000"),
        ("seed", [-2, True, 1.0], "None or an integer of at least 0"),
        ("stop", ["", [""], ["a", ""], [1], b"a"], "a list of strings that are not empty"),
        ("stop_token_ids", [[-1], [True], [1.0], "12", 3], "a list of token ids"),
        ("bad_words", ["", [""], 1, ["a\ud800"]], "a list of strings that are not empty"),
        (
            "logit_bias",
            [{1: NAN}, {1: 101}, {-1: 1}, {True: 1}, {"1": 1}, [1]],
            "a mapping of token ids to numbers",
        ),
        ("min_tokens", [-1, True], "an integer of at least 0"),
        ("allowed_token_ids", [[], [-1], [True], "12", 3], "None or a list of token ids"),
        ("max_tokens", [0, -1, True, 1.0], "an integer of at least 1"),
        ("logprobs", [-2, 1.0, 0.5], "None or an integer of at least 0"),
        ("prompt_logprobs", [-2, "1"], "None or an integer of at least 0"),
        ("logits_processors", [[1], 1], "a list of callables"),
        ("ignore_eos", [1, "yes"], "True or False"),
        ("skip_special_tokens", [0, None], "True or False"),
        ("include_stop_str_in_output", [0, None], "True or False"),
    ],
)
def test_values_that_are_not_allowed(name: str, values: list[Any], allowed: str) -> None:
    """The error names the parameter, quotes the value and says what is allowed."""
    for value in values:
        with pytest.raises(RequestError) as raised:
            SamplingParams(**{name: value})
        assert str(raised.value).startswith(f"SamplingParams: {name} is {value!r}: use {allowed}")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (dict.fromkeys(("stop", "stop_token_ids", "bad_words", "logit_bias")), {}),
        ({"seed": -1, "top_k": -1, "logits_processors": None}, {}),
        ({"temperature": 1e-6}, {"temperature": 0}),
        ({"logprobs": True, "prompt_logprobs": True}, {"logprobs": 1, "prompt_logprobs": 1}),
        ({"logprobs": False, "prompt_logprobs": False}, {}),
    ],
)
def test_values_of_vllm(given: dict[str, Any], kept: dict[str, Any]) -> None:
    """Values by which programs for vLLM say "not set", "greedy" and "one" mean the same here."""
    assert SamplingParams(**given) == SamplingParams(**kept)


def test_every_parameter_is_checked() -> None:
    """No parameter is left out of the test above, save the one that structured output checks itself."""
    (mark,) = test_values_that_are_not_allowed.pytestmark  # type: ignore[attr-defined]
    tested = {row[0] for row in mark.args[1]}
    assert tested | {"structured_output", "structured_outputs"} == {
        field.name for field in dataclasses.fields(SamplingParams)
    }


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"min_tokens": 17},
            "min_tokens is 17 and max_tokens 16, and no output .* lower the one or raise the other",
        ),
        (
            {"n": 2, "temperature": 0},
            "n is 2 and temperature 0, and greedy decoding gives the same output every time",
        ),
    ],
)
def test_contradictions(values: dict[str, Any], message: str) -> None:
    """Two values that exclude each other are named, with the reason and both ways out."""
    with pytest.raises(RequestError, match=message):
        SamplingParams(**values)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "yes or no",
            "'yes or no' is no mapping with one of the keys json, regex, choice, grammar",
        ),
        ({"json": {}, "regex": "a"}, "is no mapping with one of the keys"),
        ({"jsn": {}}, "unknown kind 'jsn': did you mean 'json'?"),
        (
            {"choice": []},
            r"choice is [], which is no list of choices: give a list of at least one text, none of them",
        ),
        ({"choice": ["a", ""]}, "choice is ['a', ''], which is no list of choices"),
        ({"choice": "ab"}, "choice is 'ab', which is no list of choices"),
        (
            {"regex": ""},
            "regex is '', which is no regular expression: give a text that is not empty",
        ),
        ({"grammar": 5}, "grammar is 5, which is no grammar: give a text"),
        ({"json": ["a"]}, "json is ['a'], which is no JSON schema: give an object, or its text"),
    ],
)
def test_structured_outputs_of_another_form(value: Any, message: str) -> None:
    """Their form is checked when they are made; whether they compile, the engine finds out."""
    with pytest.raises(RequestError, match=re.escape(message)) as raised:
        SamplingParams(structured_output=value)
    assert raised.value.field == "structured_output"


def test_structured_outputs_of_vllm() -> None:
    """vLLM's name, and an object of its form, are taken as a mapping with what is asked for."""
    form = SimpleNamespace(json=None, regex="a+", choice=None, grammar=None, json_object=None)
    for given in (form, {"regex": "a+"}, {"regex": "a+", "json": None}):
        params = SamplingParams(structured_outputs=given)
        assert params.structured_output == {"regex": "a+"}
        assert dataclasses.replace(params, n=1) == params
    with pytest.raises(
        RequestError, match="structured_output and structured_outputs are both given"
    ):
        SamplingParams(structured_output={"regex": "a"}, structured_outputs=form)


def test_lists_are_kept_as_tuples_of_their_own() -> None:
    """One string is a list of one, and what the caller changes later changes nothing."""
    stop, bias = ["a"], {1: 2.0}
    params = SamplingParams(stop=stop, logit_bias=bias, bad_words="b", stop_token_ids={3})
    stop.append("c")
    bias[4] = NAN
    assert (params.stop, params.logit_bias, params.bad_words, params.stop_token_ids) == (
        ("a",),
        {1: 2.0},
        ("b",),
        (3,),
    )
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams().greedy


@pytest.mark.parametrize(
    ("params", "tokens", "reason"),
    [
        ({"max_tokens": 9}, [5, 0], "stop"),
        ({"max_tokens": 9, "min_tokens": 2}, [5, 0, 0], "stop"),
        ({"max_tokens": 3, "ignore_eos": True}, [0, 0, 0], "length"),
        ({"max_tokens": 9, "ignore_eos": True, "stop_token_ids": [7]}, [0, 7], "stop"),
        ({"max_tokens": 2}, [5, 0], "stop"),
        ({"max_tokens": 99}, [5, 5, 5, 5, 5], "length"),
    ],
)
def test_what_ends_a_request(params: dict[str, Any], tokens: list[int], reason: str) -> None:
    """A request ends at the last of these tokens and not before, here in a context of 8 with a prompt of 3."""
    request = Request("a", [1, 2, 3], SamplingParams(**params), eos={0})
    assert [request.append(token, 8) for token in tokens] == [False] * (len(tokens) - 1) + [True]
    assert request.finish_reason == reason
    assert request.tokens() == [1, 2, 3, *tokens]
    assert request.tokens(2, 4) == [3, tokens[0]]


def test_an_empty_prompt_is_refused() -> None:
    """There must be a token to go on from."""
    with pytest.raises(RequestError, match="'a' has an empty prompt: give it at least one token"):
        Request("a", [], SamplingParams())


def test_equal_settings_have_the_same_hash() -> None:
    """They can be keys, with biases and structured outputs too."""
    made = [
        SamplingParams(logit_bias={5: 1.0}, structured_output={"regex": "a"}, stop=["x"])
        for _ in range(2)
    ]
    assert (
        len(
            {
                *made,
                SamplingParams(logit_bias={5: 2.0}, structured_output={"regex": "a"}, stop=["x"]),
            }
        )
        == 2
    )
