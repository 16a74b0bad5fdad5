"""Structured output: compiled grammars, their masks, and requests that follow them."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from opgraft.engine.sampling import Grammar, GrammarState, GrammarTokens, Sampler, SamplingBatch
from opgraft.engine.sampling_params import SamplingParams
from opgraft.errors import InputError, RequestError
from opgraft.models.files import open_weights
from opgraft.serving.tokenizer import Tokenizer, open_tokenizer

VOCABULARY = 49_152
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    pytest.importorskip("llguidance")
    return open_tokenizer(open_weights("smollm2"))


@pytest.fixture(scope="module")
def tokens(tokenizer: Tokenizer) -> GrammarTokens:
    return GrammarTokens(tokenizer.backend, VOCABULARY, [tokenizer.eos_token_id])


def texts(specs: list[Any], tokens: GrammarTokens, tokenizer: Tokenizer, seed: int) -> list[str]:
    """Sample a text by each spec from random logits, in one batch, until it ends."""
    batch = SamplingBatch()
    for key, spec in enumerate(specs):
        params = SamplingParams(
            seed=seed + key, structured_output=spec, top_p=0.99 if key % 2 else 1.0
        )
        batch.add(key, params, [1], grammar=Grammar(spec, tokens))
    found: dict[Any, list[int]] = {key: [] for key in batch.keys}
    generator = torch.Generator().manual_seed(seed)
    for _ in range(400):
        if not len(batch):
            break
        logits = torch.randn(len(batch), VOCABULARY, generator=generator)
        sampled = Sampler()(logits, batch)
        assert not sampled.errors
        for key, token in zip(batch.keys, sampled.tokens.tolist(), strict=True):
            if token == tokenizer.eos_token_id:
                batch.remove(key)
            else:
                found[key].append(token)
                batch.append(key, token)
    assert len(batch) == 0, "every grammar comes to an end"
    return [tokenizer.decode(ids) for ids in found.values()]


@pytest.mark.parametrize("seed", [0, 100])
def test_requests_follow_their_grammars(
    tokens: GrammarTokens, tokenizer: Tokenizer, seed: int
) -> None:
    """Random logits give texts of the asked form: a schema's object, a regex's match, a choice, a sentence."""
    specs = [
        {"json": SCHEMA},
        {"json": json.dumps(SCHEMA)},
        {"regex": "[0-9]{3}-[a-f]{2}"},
        {"choice": ["yes", "no", "it depends"]},
        {"grammar": 'start: "a" b "c"\nb: "b" | "bb"'},
    ]
    first, second, number, choice, sentence = texts(specs, tokens, tokenizer, seed)
    for text in (first, second):
        value = json.loads(text)
        assert set(value) == {"name", "age"}
        assert 0 <= value["age"] <= 99
        assert len(value["name"]) <= 8
    assert len(number) == 6
    assert number[3] == "-"
    assert choice in {"yes", "no", "it depends"}
    assert sentence in {"abc", "abbc"}


def allowed(grammar: Grammar, output: list[int], words: int) -> list[int]:
    mask = torch.full((words,), -1, dtype=torch.int32)
    grammar.start(output).fill(mask)
    return [
        32 * word + bit
        for word, bits in enumerate(mask.tolist())
        for bit in range(32)
        if bits >> bit & 1
    ]


def test_masks_of_any_width(tokens: GrammarTokens, tokenizer: Tokenizer) -> None:
    """A mask wider than the vocabulary allows nothing beyond it, a narrower one is the beginning of the whole one."""
    grammar = Grammar({"choice": ["yes", "no"]}, tokens)
    whole = allowed(grammar, [], VOCABULARY // 32)
    assert {tokenizer.decode([token]) for token in whole} == {"y", "ye", "yes", "n", "no"}
    assert allowed(grammar, [], VOCABULARY // 32 + 3) == whole
    assert allowed(grammar, [], 10) == [token for token in whole if token < 320]


def test_an_output_goes_on_after_a_preemption(tokens: GrammarTokens, tokenizer: Tokenizer) -> None:
    """A state that starts with an output allows what a state allows that accepted its tokens one by one."""
    grammar = Grammar({"json": SCHEMA}, tokens)
    output = tokenizer.encode('{"name": "Al', add_special_tokens=False)
    state = grammar.start()
    for token in output:
        state.accept(token)
    mask = torch.zeros(VOCABULARY // 32, dtype=torch.int32)
    state.fill(mask)
    bits = [
        32 * word + bit
        for word, part in enumerate(mask.tolist())
        for bit in range(32)
        if part >> bit & 1
    ]
    assert allowed(grammar, output, VOCABULARY // 32) == bits
    with pytest.raises(RequestError, match=r"token \d+ does not follow the grammar"):
        grammar.start([*output, tokenizer.encode("\n", add_special_tokens=False)[0]])


def test_after_its_end_a_grammar_allows_ends(tokens: GrammarTokens, tokenizer: Tokenizer) -> None:
    """Under ``ignore_eos`` a finished output goes on with ends of sequence and nothing else."""
    (no,) = tokenizer.encode("no", add_special_tokens=False)
    state = Grammar({"choice": ["no"]}, tokens).start([no])
    assert state.finished
    for _ in range(3):
        mask = torch.zeros(VOCABULARY // 32, dtype=torch.int32)
        state.fill(mask)
        assert mask.nonzero().flatten().tolist() == [tokenizer.eos_token_id // 32]
        state.accept(tokenizer.eos_token_id)
    with pytest.raises(RequestError, match="does not follow the grammar"):
        state.accept(no)


def test_a_grammar_that_leads_nowhere_fails_its_request(
    tokens: GrammarTokens, tokenizer: Tokenizer
) -> None:
    """Where nothing can follow, that request fails by name and its neighbour goes on."""
    batch = SamplingBatch()
    endless = Grammar({"grammar": 'start: "no" | "yes" x\nx: x "c"'}, tokens)
    batch.add(
        "stuck",
        SamplingParams(),
        [1],
        tokenizer.encode("yes", add_special_tokens=False),
        grammar=endless,
    )
    batch.add("other", SamplingParams(temperature=0.0), [1])
    sampled = Sampler()(torch.arange(float(VOCABULARY)).repeat(2, 1), batch)
    assert "its grammar cannot go on" in sampled.errors["stuck"]
    assert sampled.tokens.tolist() == [-1, VOCABULARY - 1]


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("json", "is no mapping with one of the keys json, regex, choice, grammar"),
        ({}, "is no mapping with one of the keys"),
        ({"json": {}, "regex": "a"}, "is no mapping with one of the keys"),
        ({"jsn": {}}, "unknown kind 'jsn': did you mean 'json'"),
        ({"json": "{nope"}, "json is no valid JSON schema: JSONDecodeError"),
        ({"json": {"type": {1, 2}}}, "json is no valid JSON schema: TypeError"),
        ({"json": {"type": "objekt"}}, "the JSON schema in json cannot be used: .*objekt"),
        ({"json": {"$ref": "#/$defs/nope"}}, "'/\\$defs/nope' does not exist"),
        ({"json": {"type": "array", "uniqueItems": True}}, "Unimplemented keys"),
        (
            {"json": {"type": "integer", "minimum": 5, "maximum": 3}},
            "Unsatisfiable schema: minimum",
        ),
        ({"json": False}, "json is False, which is no JSON schema: give an object"),
        (
            {"regex": "[0-9"},
            "the regular expression in regex cannot be used: .*unclosed character class",
        ),
        ({"regex": 5}, "regex is 5, which is no regular expression: give a text"),
        ({"regex": "a[^\\s\\S]"}, "nothing can meet the regular expression in regex"),
        (
            {"choice": []},
            r"choice is \[\], which is no list of choices: give a list of at least one text",
        ),
        ({"choice": ["a", ""]}, "give a list of at least one text, none of them empty"),
        ({"choice": "ab"}, "choice is 'ab', which is no list of choices"),
        ({"grammar": "start: nope"}, "the grammar in grammar cannot be used: .*unknown name"),
        ({"grammar": 'start: start "a"'}, "nothing can meet the grammar in grammar"),
    ],
    ids=str,
)
def test_invalid_specs(spec: Any, reason: str, tokens: GrammarTokens) -> None:
    """What cannot be used, or met by any text, is refused with the reason."""
    with pytest.raises(InputError, match=reason):
        Grammar(spec, tokens)


def test_a_tokenizer_that_cannot_serve() -> None:
    """Another tokenizer than a fast one is refused."""
    pytest.importorskip("llguidance")
    with pytest.raises(InputError, match="the tokenizer object cannot serve structured outputs"):
        GrammarTokens(object())


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without llguidance the error says what to install."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InputError, match=r"pip install 'opgraft\[structured\]'"):
        GrammarTokens(object())


class Broken:
    """A matcher of a library that fails."""

    def is_stopped(self) -> bool:
        return False

    def consume_token(self, token: int) -> bool:
        raise OverflowError("no more room")

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
        raise OverflowError("no more room")


def test_a_library_that_raises_fails_the_request(tokens: GrammarTokens) -> None:
    """Whatever the library raises at a token or a mask is an error of the request."""
    state = GrammarState(Broken(), tokens.tokens)
    with pytest.raises(
        RequestError, match="its grammar cannot take token 5: OverflowError: no more room"
    ):
        state.accept(5)
    with pytest.raises(RequestError, match="its grammar cannot go on: OverflowError: no more room"):
        state.fill(torch.zeros(VOCABULARY // 32, dtype=torch.int32))


def test_a_structured_output_needs_its_grammar() -> None:
    """A request that asks for one is not sampled without."""
    with pytest.raises(RequestError, match="a structured output without its grammar"):
        SamplingBatch().add(0, SamplingParams(structured_output={"regex": "a"}), [1])
