"""The settings of one request: the sampling of its tokens, and the conditions of its end."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from opgraft.engine.structured_form import KINDS, expect_form
from opgraft.errors import InputError, RequestError

MOST_COMPLETIONS = 16_384
"""Each completion of a prompt is a request of its own."""

COLDEST = 0.001
"""Temperatures below are greedy decoding: logits divided by less overflow in half precision."""


class _Rule(NamedTuple):
    """The values that a setting may have, and words for a message about other values."""

    accepts: Callable[[Any], bool]
    words: str


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    # NaN, infinities and integers beyond every float are refused.
    return abs(value) <= sys.float_info.max


def _is_token_id(value: Any) -> bool:
    return _is_integer(value) and value >= 0


def _integer(minimum: int, note: str = "") -> _Rule:
    words = f"an integer of at least {minimum}{note}"
    return _Rule(lambda v: _is_integer(v) and v >= minimum, words)


def _optional_integer(note: str) -> _Rule:
    words = f"None or an integer of at least 0{note}"
    return _Rule(lambda v: v is None or (_is_integer(v) and v >= 0), words)


def _number_within(minimum: float, maximum: float, note: str = "") -> _Rule:
    words = f"a number from {minimum:g} to {maximum:g}{note}"
    return _Rule(lambda v: _is_number(v) and minimum <= v <= maximum, words)


def _tuple_of(accepts: Callable[[Any], bool], words: str) -> _Rule:
    return _Rule(lambda v: isinstance(v, tuple) and all(map(accepts, v)), f"a list of {words}")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_unicode(value: Any) -> bool:
    if not _is_text(value):
        return False
    # Tokenizers in Rust cannot read halves of surrogate pairs.
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _is_bias(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    tokens_are_ids = all(map(_is_token_id, value))
    return tokens_are_ids and all(
        _is_number(bias) and -100 <= bias <= 100 for bias in value.values()
    )


def _is_allowed_tokens(value: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, tuple) and value != () and all(map(_is_token_id, value))


_FLAG = _Rule(lambda v: isinstance(v, bool), "True or False")

_RULES: Mapping[str, _Rule] = {
    "n": _Rule(
        lambda v: _is_integer(v) and 1 <= v <= MOST_COMPLETIONS,
        f"an integer of at least 1 and at most {MOST_COMPLETIONS:,}",
    ),
    "temperature": _Rule(
        lambda v: _is_number(v) and v >= 0,
        "0 for greedy decoding, or a number above",
    ),
    "top_k": _integer(0, ", where 0 keeps every token, or -1 for the same"),
    "top_p": _Rule(
        lambda v: _is_number(v) and 0 < v <= 1,
        "a number above 0 and at most 1, where 1 keeps every token",
    ),
    "min_p": _number_within(0, 1, ", where 0 keeps every token"),
    "presence_penalty": _number_within(-2, 2),
    "frequency_penalty": _number_within(-2, 2),
    # Other penalties overflow in half precision.
    "repetition_penalty": _number_within(0.001, 1000, ", where 1 is no penalty"),
    "seed": _optional_integer(", where None draws other numbers for each request"),
    "stop": _tuple_of(_is_text, "strings that are not empty, as every text ends with an empty one"),
    "allowed_token_ids": _Rule(
        _is_allowed_tokens, "None or a list of token ids, integers of at least 0, one at least"
    ),
    "stop_token_ids": _tuple_of(_is_token_id, "token ids, integers of at least 0"),
    "bad_words": _tuple_of(
        _is_unicode, "strings that are not empty, and have no halves of surrogate pairs"
    ),
    "logit_bias": _Rule(_is_bias, "a mapping of token ids to numbers from -100 to 100"),
    "min_tokens": _integer(0),
    "max_tokens": _Rule(
        lambda v: v is None or (_is_integer(v) and v >= 1),
        "an integer of at least 1, or None for as many as the context holds",
    ),
    "ignore_eos": _FLAG,
    "logprobs": _optional_integer(
        ", where None gives none and 0 the sampled token's alone, and -1 all"
    ),
    "prompt_logprobs": _optional_integer(
        ", where None gives none and 0 the prompt's own tokens' alone, and -1 all"
    ),
    "logits_processors": _tuple_of(callable, "callables"),
    "skip_special_tokens": _FLAG,
    "include_stop_str_in_output": _FLAG,
}
"""Rules by field."""


_LOGPROBS = ((-1, sys.maxsize), (True, 1), (False, None))
_WORDS_OF_VLLM: Mapping[str, Sequence[tuple[Any, Any]]] = {
    "top_k": ((-1, 0),),
    "seed": ((-1, None),),
    "logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
    "stop": ((None, ()),),
    "stop_token_ids": ((None, ()),),
    "bad_words": ((None, ()),),
    "logit_bias": ((None, {}),),
    "logits_processors": ((None, ()),),
}
"""By field: values of vLLM, each with its equal here."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Settings of one request, checked when they are made. The names are those of vLLM.

    Attributes:
        n: completions of the prompt.
        temperature: divides the logits; 0, or less than 0.001, takes the likeliest token (greedy
            decoding).
        top_k: number of likeliest tokens to keep, 0 or -1 for all.
        top_p: keep the likeliest tokens, until their probabilities add up to this number.
        min_p: least probability of a kept token, as a share of the likeliest token's.
        presence_penalty, frequency_penalty: taken off the logits of tokens in the output: once, and
            per occurrence.
        repetition_penalty: divides positive logits of tokens in prompt and output, and multiplies
            negative ones.
        seed: of the request's own random numbers; -1 stands for None.
        stop: strings that end the output; a single string is a list of one.
        stop_token_ids: tokens that end the output.
        allowed_token_ids: the only tokens that the output may have.
        bad_words: strings that never occur in the output.
        logit_bias: numbers to add to logits, by token id.
        min_tokens: tokens of the output, at least.
        max_tokens: tokens of the output, at most; ``None`` for as many as the context holds.
        ignore_eos: go on after the model's end of sequence.
        logprobs, prompt_logprobs: number of likeliest tokens to give log-probabilities of, at each
            token; -1 for all, kept as ``sys.maxsize``, and True for 1.
        logits_processors: called with the output so far and the logits; each returns logits.
        structured_output: the form of the output, such as ``{"json": schema}``.
        structured_outputs: vLLM's name for the same, a mapping or an object with such attributes;
            kept as ``structured_output``.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: leave the string of ``stop`` that ended the output in the text.

    Raises:
        RequestError: a value is not allowed, or two contradict each other.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict, hash=False)
    min_tokens: int = 0
    max_tokens: int | None = 16
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logits_processors: Sequence[Callable[..., Any]] = ()
    structured_output: Any = dataclasses.field(default=None, hash=False)
    structured_outputs: Any = dataclasses.field(default=None, hash=False, repr=False)
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        self._take_words_of_vllm()
        for name, rule in _RULES.items():
            given = getattr(self, name)
            value = _kept(given)
            if not rule.accepts(value):
                raise _request_error(f"{name} is {given!r}: use {rule.words}", name)
            object.__setattr__(self, name, value)
        self._expect_no_contradiction()

    def _expect_no_contradiction(self) -> None:
        if self.structured_output is not None:
            try:
                expect_form(self.structured_output)
            except InputError as error:
                raise _request_error(str(error), "structured_output") from error
        if self.min_tokens > self.most_tokens:
            raise _request_error(
                f"min_tokens is {self.min_tokens} and max_tokens {self.max_tokens}, and no output "
                "has more tokens than it may have: lower the one or raise the other",
                "min_tokens",
            )
        if self.n > 1 and self.greedy:
            raise _request_error(
                f"n is {self.n} and temperature 0, and greedy decoding gives the same output every "
                "time: use n=1, or a temperature above 0",
                "n",
            )

    def _take_words_of_vllm(self) -> None:
        """Replace values of vLLM by their equals here, such as -1 and None."""
        for name, words in _WORDS_OF_VLLM.items():
            given = getattr(self, name)
            for word, kept in words:
                if type(given) is type(word) and given == word:
                    object.__setattr__(self, name, kept)
        if _is_number(self.temperature) and 0 < self.temperature < COLDEST:
            object.__setattr__(self, "temperature", 0.0)
        if self.structured_outputs is None:
            return
        if self.structured_output is not None:
            raise _request_error(
                "structured_output and structured_outputs are both given: leave one out",
                "structured_output",
            )
        object.__setattr__(self, "structured_output", _of_vllm(self.structured_outputs))
        object.__setattr__(self, "structured_outputs", None)

    @property
    def most_tokens(self) -> int:
        """Return the tokens of the output, at most; ``sys.maxsize`` if the settings do not say."""
        return sys.maxsize if self.max_tokens is None else self.max_tokens

    @property
    def greedy(self) -> bool:
        """Return True if every token is the likeliest one."""
        return self.temperature == 0


def _request_error(message: str, field: str) -> RequestError:
    return RequestError(message, field, source="SamplingParams")


def _of_vllm(given: Any) -> Any:
    """Return a structured output, from a mapping or object with a value or None for each kind."""
    if not isinstance(given, Mapping):
        given = {kind: getattr(given, kind, None) for kind in KINDS}
    return {kind: value for kind, value in given.items() if value is not None}


def _kept(value: Any) -> Any:
    """Return a value that no caller can change: tuples for lists and sets, copies of mappings."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Collection) and not isinstance(value, bytes):
        return tuple(value)
    return value
