"""Drafts change no bit: neither of tokens nor of log-probabilities, whatever requests ask for."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft import SamplingParams
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.compat import packed_linear
from opgraft.config import OpgraftConfig
from opgraft.engine.core import EngineCore, EngineOutput
from opgraft.engine.request import Request
from opgraft.engine.sampling import Grammar, GrammarTokens
from opgraft.errors import ConfigError
from opgraft.kernels.engine import Proposer
from opgraft.serving.llm import LLM
from support.engines import prompts, replaced, settings
from support.random_decoders import (
    OF_CPU_KERNELS,
    THROUGH_TRANSFORMERS,
    hybrid,
    through_transformers,
    written,
)
from support.small_tokenizers import trained_tokenizer

FAMILIES = {"Llama": {"tie_word_embeddings": True}, "Gemma3": {"sliding_window": 20}, "smollm3": {}}
SMALL: dict[str, Any] = {"num_blocks": 34, "max_num_batched_tokens": 23, "max_model_len": 64}
"""Prompts come in chunks, and the cache is too small for all requests that run."""

Told = dict[str, list[EngineOutput]]


class Seer(Proposer):
    """Proposes the tokens of a run without drafts, but for some wrong ones."""

    answers: Mapping[str, Sequence[int]] = {}

    def propose(self, request: Request, most: int) -> Sequence[int]:
        draw = random.Random(f"{request.request_id} {len(request.output)}")  # noqa: S311  # no secret
        known = self.answers[request.request_id][len(request.output) :][:most]
        return [token if draw.random() < 0.8 else draw.randrange(400) for token in known]

    def forget(self, request: Request) -> None:
        pass

    def forget_all(self) -> None:
        pass


@pytest.fixture
def seen() -> Iterator[Callable[[Told], None]]:
    """Puts a proposer that has seen these answers in the place of all others."""

    def see(told: Told) -> None:
        Seer.answers = {name: [each.token for each in news] for name, news in told.items()}  # type: ignore[misc]
        PluggableClass.register_oot(Seer, name="proposer")

    yield see
    PluggableClass.unregister_oot(Seer)


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    unpackable = packed_linear.missing(getattr(torch, request.param))
    if unpackable:
        pytest.skip(unpackable)
    return str(request.param)


def folder_of(family: str, folder: Path) -> Path:
    if family in THROUGH_TRANSFORMERS:
        through_transformers(family, folder, **OF_CPU_KERNELS)
    else:
        written(family, folder, **OF_CPU_KERNELS, **FAMILIES[family])
    return folder


def core_of(folder: Path, dtype: str, drafts: dict[str, Any] | None, **sizes: Any) -> EngineCore:
    given = replaced(
        settings(folder, **{**SMALL, **sizes}), model={"dtype": dtype, "batch_invariant": True}
    )
    # Blocks of the kernels for attention.
    given = replaced(given, cache={"block_size": 16, "num_blocks": sizes.get("num_blocks", 14)})
    if drafts is not None:
        given = replaced(given, speculation={"method": "ngram", "adaptive": False, **drafts})
    return EngineCore(given)


def served(core: EngineCore, requests: Sequence[Request], preempting: bool = False) -> Told:
    """Serve requests, and return what is told of each but for times."""
    told: Told = {}
    core.add(part for request in requests for part in request.split())
    for number in count():
        for output in core.step():
            told.setdefault(output.request_id, []).append(output)
        if not core.has_work:
            return told
        if preempting and number % 5 == 0 and core.scheduler.running:
            core.scheduler._preempt(core.scheduler.running[-1])
    raise AssertionError


PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}
LONG = {"max_tokens": 24, "ignore_eos": True}
GREEDY = {"temperature": 0, **LONG}
KINDS: Mapping[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "greedy, penalties": {**GREEDY, **PENALTIES, "logprobs": 2},
    "greedy, until a token": {"temperature": 0, "max_tokens": 24, "stop_token_ids": [*range(60)]},
    "greedy, at least": {**GREEDY, "min_tokens": 9, "stop_token_ids": [*range(200)], "logprobs": 0},
    "drawn": {**LONG, "seed": 3, "logprobs": 3},
    "drawn without a seed": {**LONG, "temperature": 0.6, "logprobs": 0},
    "drawn from few": {**LONG, "seed": 4, "top_k": 5, "top_p": 0.9, "temperature": 0.7},
    "drawn three times": {**LONG, "n": 3, "seed": 5, "min_p": 0.05, "logprobs": 1},
    "drawn, penalties": {**LONG, "seed": 6, **PENALTIES, "logit_bias": {7: 4.0}},
    "words": {**GREEDY, "bad_words": ["none"], "prompt_logprobs": 1, "logprobs": 1},
    "some tokens": {**LONG, "seed": 7, "allowed_token_ids": [*range(5, 90)]},
}


def requests_of_all_kinds(grammar: Grammar | None = None) -> list[Request]:
    made = []
    given = prompts(*(4 + 3 * number for number in range(len(KINDS))))
    for (name, params), prompt in zip(KINDS.items(), given, strict=True):
        words = [(prompt[0],), (prompt[1], prompt[2])] if "bad_words" in params else ()
        made.append(Request(name, prompt, SamplingParams(**params), eos={2}, bad_words=words))
    # Begins like another one.
    made.append(Request("again", [*given[-1][:30], 5], SamplingParams(**GREEDY)))
    if grammar is not None:
        for seed in (1, 2):
            params = SamplingParams(
                structured_output=grammar.spec, seed=seed, max_tokens=30, logprobs=1
            )
            made.append(Request(f"grammar {seed}", given[3], params, eos={2}, grammar=grammar))
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_no_bit_changes(
    plugin: Path,
    tmp_path: Path,
    family: str,
    dtype: str,
    seen: Callable[[Told], None],
) -> None:
    """Requests of all kinds beside each other, preempted and from reused prefixes, with right and wrong drafts."""
    pytest.importorskip("llguidance")
    folder = folder_of(family, tmp_path / "model")
    grammar = Grammar(
        {"regex": "(the cat|a mat){2,6}!"}, GrammarTokens(trained_tokenizer(), 400, [2])
    )
    plain = core_of(folder, dtype, None)
    expected = served(plain, requests_of_all_kinds(grammar))
    assert plain.stats().counters.drafts == 0
    seen(expected)
    for most in (1, 6):
        core = core_of(folder, dtype, {"max_tokens": most})
        found = served(core, requests_of_all_kinds(grammar), preempting=True)
        assert found == expected
        counters = core.stats().counters
        assert counters.drafts
        assert 0.4 < counters.accepted_tokens / counters.draft_tokens < 0.9
        assert counters.preemptions
        assert counters.sampled_tokens >= sum(map(len, expected.values()))
        assert core.cache.pool.num_free == core.cache.pool.num_blocks


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_fewer_steps_for_the_same_bits(plugin: Path, tmp_path: Path, method: str) -> None:
    """An answer that repeats itself takes fewer steps, and a request that was answered before takes fewer still."""
    folder = folder_of("Llama", tmp_path / "model")
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=1)

    def answered(core: EngineCore) -> tuple[Any, list[int]]:
        steps = []
        for name in ("first", "second"):
            before = core.stats().counters.steps
            told = served(core, [Request(name, prompts(9)[0], params)])
            steps.append(core.stats().counters.steps - before)
            yield_of = [(each.token, each.logprobs) for each in told[name]]
        return yield_of, steps

    expected, plain = answered(core_of(folder, "float32", None))
    found, steps = answered(core_of(folder, "float32", {"method": method, "max_tokens": 6}))
    assert found == expected
    assert steps[0] < plain[0]
    if method == "suffix":
        assert steps[1] < steps[0]


def test_texts_end_at_their_stop_strings(plugin: Path, tmp_path: Path) -> None:
    """A stop string within the tokens of one step ends the text there, and what came behind it is dropped."""
    folder = tmp_path / "model"
    written("Llama", folder, **OF_CPU_KERNELS, tie_word_embeddings=True)
    trained_tokenizer().save(str(folder / "tokenizer.json"))
    common: dict[str, Any] = {
        "dtype": "float32", "max_model_len": 64, "cache.num_blocks": 40, "load.progress": False,
        "model.batch_invariant": True,
    }  # fmt: skip
    texts = ["the cat sat", "12 cats, 123 mats", "don't they"]
    drafts = {"speculation.method": "ngram", "speculation.adaptive": False}
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)

    def ended(llm: LLM, params: Sequence[SamplingParams]) -> list[Any]:
        return [
            (each.text, each.token_ids, each.finish_reason, each.stop_reason, each.logprobs)
            for output in llm.generate(texts, list(params))
            for each in output.outputs
        ]

    with LLM(str(folder), **common) as plain, LLM(str(folder), **common, **drafts) as llm:
        whole = ended(plain, [greedy] * 3)
        assert ended(llm, [greedy] * 3) == whole
        for first in range(3, 24, 3):
            params = [
                SamplingParams(
                    temperature=0, max_tokens=40, ignore_eos=True, logprobs=1,
                    stop=text[first : first + 3], include_stop_str_in_output=first % 2 == 0,
                )
                for text, *_ in whole
            ]  # fmt: skip
            expected = ended(plain, params)
            assert {reason for _, _, reason, *_ in expected} == {"stop"}
            assert ended(llm, params) == expected
        assert llm.stats().counters.accepted_tokens


@pytest.mark.slow
def test_ten_thousand_requests(plugin: Path, tmp_path: Path, seen: Callable[[Told], None]) -> None:
    """Of 10,000 random requests, some aborted, none has another bit than without drafts."""
    folder = folder_of("Llama", tmp_path / "model")
    sizes = {"num_blocks": 60, "max_num_seqs": 16, "max_num_batched_tokens": 128}
    draw = random.Random(7)  # noqa: S311  # no secret
    for part in range(10):
        made = []
        for number in range(1000):
            kind = draw.choice([name for name in KINDS if name != "words"])
            prompt = [draw.randrange(3, 400) for _ in range(draw.randrange(1, 40))]
            params = {**KINDS[kind], "max_tokens": draw.randrange(10, 24)}
            made.append((f"{part} {number}", prompt, params))

        def requests(made: Any = made) -> list[Request]:
            return [Request(name, prompt, SamplingParams(**p), eos={2}) for name, prompt, p in made]

        expected = served(core_of(folder, "float32", None, **sizes), requests())
        seen(expected)
        drafts = {"max_tokens": 8, "adaptive": True} if part % 2 else {"max_tokens": 4}
        core = core_of(folder, "float32", drafts, **sizes)
        assert served(core, requests(), preempting=part % 3 == 0) == expected
        assert core.stats().counters.accepted_tokens


def test_models_with_states_are_refused(tmp_path: Path) -> None:
    """A state cannot go back behind a token that was not accepted, so drafts are refused at start."""
    hybrid("bamba", tmp_path)
    given: OpgraftConfig = replaced(
        settings(tmp_path), speculation={"method": "ngram", "exact": False}
    )
    with pytest.raises(ConfigError, match="keep a state of each sequence, which cannot go back"):
        EngineCore(given)
