"""``LLM`` refuses what it cannot do with a message that says what to do, and goes on as if it had not been asked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft import OpgraftConfig, SamplingParams
from opgraft.engine.runner.memory_query import MemoryQuery
from opgraft.errors import ConfigError, InputError, ModelError, OpgraftError, RequestError
from opgraft.ops import RMSNorm
from opgraft.serving.engine_settings import engine_config
from opgraft.serving.llm import LLM, Interrupted
from support.engines import add, expect_empty, in_its_thread
from support.random_decoders import saved, transformers
from support.small_models import CONTEXT, VOCABULARY, open_llm, write_model

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
PROMPT = [9, 8, 7, 6, 5]


@pytest.fixture(scope="module")
def folder(trained: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llm") / "model", trained)


@pytest.fixture(scope="module")
def without_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llm") / "model")


@pytest.fixture
def llm(folder: Path) -> LLM:
    return open_llm(folder)


def expect_nothing_held(llm: LLM) -> None:
    assert not any((llm.engine._open, llm.engine._owner, llm.engine.core.has_work))
    expect_empty(llm.engine.core)


def tokens(llm: LLM, *prompts: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(list(prompts), GREEDY)]


PROMPTS: dict[str, tuple[Any, str]] = {
    "too long": (
        [5] * 64,
        r"has 64 tokens and needs room for 1 more, and this model's maximum context length is 64 "
        r"tokens: shorten it by 1 token, ",
    ),
    "longer still": (
        "cat " * 99,
        r"tokens and needs room for 1 more, and this model's maximum context length is 64 tokens",
    ),
    "empty": ([], r"has no tokens: give some text, or at least one token id"),
    "empty text": ("", r"has no tokens"),
    "beyond the vocabulary": (
        [5, VOCABULARY],
        r"has the token id 400 at place 1, and the vocabulary has 400 \(0 to 39",
    ),
    "below it": ([-1], r"has the token id -1 at place 0"),
    "no token": ([5, 1.5], r"has 1.5 at place 1, which is no token id: give whole numbers"),
    "of another kind": (None, r"is NoneType: give text, a list of token ids"),
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_prompts_that_cannot_be_taken(llm: LLM, kind: str) -> None:
    """The error says which prompt and why; none of those given with it is computed, and the next call is answered."""
    prompt, message = PROMPTS[kind]
    expected = tokens(llm, PROMPT)
    with pytest.raises(RequestError, match=message):
        llm.generate([PROMPT, "cat", prompt, PROMPT], GREEDY)
    expect_nothing_held(llm)
    assert tokens(llm, PROMPT) == expected


def test_a_schema_that_nothing_meets(llm: LLM) -> None:
    """It is refused before anything is computed, for those given with it too, and the next call is answered."""
    pytest.importorskip("llguidance")
    impossible = SamplingParams(
        structured_output={"json": {"type": "integer", "minimum": 5, "maximum": 3}}
    )
    with pytest.raises(InputError, match=r"structured output: .*Unsatisfiable schema: minimum"):
        llm.generate([PROMPT, "cat"], [GREEDY, impossible])
    expect_nothing_held(llm)
    assert len(tokens(llm, PROMPT)[0]) == 5


def test_no_prompts(llm: LLM) -> None:
    """No prompts have no answers."""
    assert llm.generate([], GREEDY) == []


def test_as_many_params_as_prompts(llm: LLM) -> None:
    """One SamplingParams is for all prompts, or each has its own."""
    with pytest.raises(
        RequestError, match="2 prompts come with 1 SamplingParams: give one for all, or one each"
    ):
        llm.generate([PROMPT, PROMPT], [GREEDY])
    expect_nothing_held(llm)


def test_the_context_ends_an_answer(llm: LLM) -> None:
    """Tokens that the context has no room for are not computed; the reason is the length."""
    (output,) = llm.generate(
        [[5] * 60], SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    )
    assert len(output.outputs[0].token_ids) == CONTEXT - 60
    assert output.outputs[0].finish_reason == "length"
    expect_nothing_held(llm)


def test_a_request_that_the_cache_cannot_hold(folder: Path) -> None:
    """A cache too small for one request of the longest context is an error at start, with the numbers."""
    numbers = r"the cache has room for 15 blocks of 768 bytes, and one request of 64 tokens takes 16: raise cache"
    with pytest.raises(ConfigError, match=numbers):
        open_llm(folder, **{"cache.num_blocks": 15})
    with pytest.raises(
        ConfigError, match=r"room for 0 blocks of 768 bytes.*cache.memory_bytes to 12288"
    ):
        open_llm(folder, **{"cache.num_blocks": None, "cache.memory_bytes": 700})
    assert len(tokens(open_llm(folder, **{"cache.num_blocks": 16}), [5] * 59)[0]) == 5


@pytest.mark.parametrize(
    "size", [{"cache.num_blocks": 1 << 40}, {"cache.memory_bytes": 1 << 50}], ids=str
)
def test_a_cache_that_memory_cannot_hold(folder: Path, size: dict[str, int]) -> None:
    """A cache larger than what is free is an error at start, with both numbers."""
    with pytest.raises(
        ConfigError, match=r"the cache of [\d,]+ blocks .* takes [\d,]+ bytes, and [\d,]+ are free"
    ):
        open_llm(folder, **{"cache.num_blocks": None, **size})


def test_memory_that_nobody_knows_bounds_no_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the platform does not tell what is free, the size that is set is taken."""
    monkeypatch.setattr(MemoryQuery, "free", lambda self: None)
    assert len(tokens(open_llm(folder), PROMPT)[0]) == 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cache.num_blocks": 16, "cache.memory_bytes": 4096}, "cache.num_blocks is 16 and cache.memory_bytes 4096"),
        ({"max_model_len": 32, "model.max_model_len": 48}, "max_model_len is 32 and model.max_model_len 48, and both"),
        ({"max_model_len": CONTEXT + 1}, r"model.max_model_len is 65, and .* was made for contexts of up to 64 tokens"),
    ],
)  # fmt: skip
def test_settings_that_contradict(folder: Path, settings: dict[str, int], message: str) -> None:
    """A size that is given twice, and a context that the model was not made for, are errors at start."""
    with pytest.raises(ConfigError, match=message):
        open_llm(folder, **settings)


@pytest.mark.parametrize(
    ("field", "value"),
    [("logit_bias", {5: 1.0, VOCABULARY: 1.0}), ("stop_token_ids", [5, VOCABULARY])],
)
def test_tokens_beyond_the_vocabulary(llm: LLM, field: str, value: Any) -> None:
    """A bias or an end that could never come to be is refused, and nothing is computed."""
    expected = f"{field} has the token id {VOCABULARY}, and the vocabulary has {VOCABULARY}: use 0 to {VOCABULARY - 1}"
    with pytest.raises(RequestError, match=expected) as caught:
        llm.generate([PROMPT], SamplingParams(**{field: value}))
    assert caught.value.field == field
    expect_nothing_held(llm)


def test_ids_are_used_once(llm: LLM) -> None:
    """An id is refused while its request runs; afterwards it is free. The request goes on."""

    def use_ids() -> None:
        engine = llm.engine
        first = add(engine, "a", PROMPT, SamplingParams(n=2, max_tokens=3, seed=1))
        for name in ("a", "a/0"):
            with pytest.raises(
                RequestError, match=f"request '{name}' is added, and one of that id runs"
            ):
                add(engine, name, PROMPT, GREEDY)
        while engine.has_work:
            engine.step()
        assert [len(answer.token_ids) for answer in first.outputs] == [3, 3]
        add(engine, "a", PROMPT, GREEDY)
        engine.abort("a")

    in_its_thread(llm, use_ids)
    expect_nothing_held(llm)


def test_aborting_the_unknown(llm: LLM) -> None:
    """An id that was never added, or whose request has ended, is an error; others go on."""

    def abort_the_unknown() -> None:
        engine = llm.engine
        going = add(engine, "going", PROMPT, GREEDY)
        with pytest.raises(
            RequestError,
            match="request 'ghost' cannot be aborted, as none of that id runs or waits",
        ):
            engine.abort("ghost")
        with pytest.raises(
            RequestError,
            match="request 'ghost' cannot be aborted, as none of that id runs or waits",
        ):
            engine.core.abort("ghost")
        while engine.has_work:
            engine.step()
        with pytest.raises(RequestError, match="request 'going' cannot be aborted"):
            engine.abort("going")
        assert len(going.outputs[0].token_ids) == 5

    in_its_thread(llm, abort_the_unknown)
    expect_nothing_held(llm)


def nan(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    return torch.full_like(logits, torch.nan) if len(output) == 2 else logits


def raising(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    raise ArithmeticError("no such luck")


FAILURES: dict[str, tuple[Callable[..., Any], int, str]] = {
    "NaN": (nan, 2, "what the request does to its logits made 400 of 400 logits NaN or infinite"),
    "an exception": (raising, 0, "its logits processor .* raised ArithmeticError: no such luck"),
    "an exit": (
        lambda output, logits: sys.exit("enough"),
        0,
        "its logits processor .* raised SystemExit: enough",
    ),
    "a name": (
        lambda output, logits, *, bias: logits,
        0,
        "it has to have bias by name, .* functools.partial",
    ),
    "another shape": (
        lambda output, logits: logits[:3],
        0,
        r"returned \(3,\), expected a tensor \(400,\)",
    ),
    "another layout": (
        lambda output, logits: logits.to_sparse(),
        0,
        "logits processor .* raised RuntimeError: copy_",
    ),
    "no numbers": (
        lambda output, logits: logits.to("meta"),
        0,
        "its logits processor .* raised NotImplementedError",
    ),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_request_that_fails_alone(llm: LLM, failure: str, temperature: float) -> None:
    """A request whose logits cannot be sampled ends with the error; its neighbours have the tokens of every day."""
    processor, had, message = FAILURES[failure]
    usual = SamplingParams(temperature=temperature, max_tokens=5, ignore_eos=True, seed=3)
    bad = SamplingParams(
        temperature=temperature, max_tokens=5, ignore_eos=True, logits_processors=[processor]
    )
    prompts = [[5, 6], PROMPT, [7] * 9]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, usual)]
    outputs = llm.generate(prompts, [usual, bad, usual])
    answer = outputs[1].outputs[0]
    assert answer.finish_reason == "error"
    assert len(answer.token_ids) == had
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(answer.error)
    assert [outputs[i].outputs[0].token_ids for i in (0, 2)] == [expected[0], expected[2]]
    expect_nothing_held(llm)


def test_weights_that_give_nan_for_one_token(tmp_path: Path) -> None:
    """A prompt with a token whose embedding is NaN fails, even from a reused prefix; others take its blocks."""
    sizes = {
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=CONTEXT, **sizes
    )
    model = saved(transformers.LlamaForCausalLM(config), tmp_path / "model")
    good = [[4] * 20, [4] * 19 + [6], [8, 9]]
    expected = tokens(open_llm(tmp_path / "model", **{"cache.num_blocks": 18}), *good)
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = torch.nan
    model.save_pretrained(tmp_path / "model")
    llm = open_llm(tmp_path / "model", **{"cache.num_blocks": 18})
    for _ in range(3):
        outputs = llm.generate([good[0], [7] * 20, good[1], [*range(8, 17), 7, 8], good[2]], GREEDY)
        answers = [output.outputs[0] for output in outputs]
        assert [answer.finish_reason for answer in answers] == [
            "length",
            "error",
            "length",
            "error",
            "length",
        ]
        assert [answer.token_ids for answer in answers[::2]] == expected
        assert all("400 of 400 logits are NaN" in str(answer.error) for answer in answers[1::2])
        expect_nothing_held(llm)


def test_a_model_without_chat_template(llm: LLM) -> None:
    """A chat needs the template; plain text does not."""
    with pytest.raises(RequestError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}], GREEDY)
    expect_nothing_held(llm)
    assert len(tokens(llm, "the cat")[0]) == 5


def test_a_checkpoint_without_tokenizer(without_tokenizer: Path) -> None:
    """Token ids are answered by token ids; text, chats and bad words are refused with what is missing."""
    llm = open_llm(without_tokenizer)
    missing = (
        "has no tokenizer: give prompts as token ids, or put tokenizer.json beside its weights"
    )
    with pytest.raises(InputError, match=missing):
        llm.generate([PROMPT, "the cat"], GREEDY)
    with pytest.raises(InputError, match=missing):
        llm.chat([{"role": "user", "content": "hi"}], GREEDY)
    with pytest.raises(InputError, match=missing):
        llm.generate([PROMPT], SamplingParams(bad_words=["cat"]))
    with pytest.raises(InputError, match=missing):
        llm.generate([PROMPT], SamplingParams(stop=["cat"]))
    expect_nothing_held(llm)
    (output,) = llm.generate(
        PROMPT, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=1)
    )
    assert (output.outputs[0].text, len(output.outputs[0].token_ids)) == ("", 5)


def test_an_encoder_generates_nothing() -> None:
    """A prompt for an encoder is an error that says what it does instead."""
    llm = LLM("minilm", **{"load.progress": False})
    with pytest.raises(
        ModelError, match=r"minilm is an encoder, which answers no prompt: LLM\.embed gives"
    ):
        llm.generate("the cat")


def test_no_model() -> None:
    """A model must be named."""
    with pytest.raises(OpgraftError, match=r"model\.name"):
        LLM()


@pytest.mark.parametrize("whole", [None, OpgraftConfig()], ids=["arguments", "whole"])
@pytest.mark.parametrize(
    "settings", [{"strict": True}, {"plugins": ()}, {"cpu_keep_memory": True}], ids=str
)
def test_an_engine_does_not_decide_about_plugins(
    whole: OpgraftConfig | None, settings: dict[str, Any]
) -> None:
    """Plugins are the whole process's: ops outside of an engine are constructed as without one."""
    assert engine_config("smollm2", whole, settings).model.name == "smollm2"
    assert RMSNorm(8).decision


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_model_length", "LLM has no argument 'max_model_length'.*max_model_len"),
        ("cache.nonsense", r"cache\.nonsense"),
    ],
)
def test_unknown_arguments(folder: Path, name: str, message: str) -> None:
    """A misspelt argument is an error with the names that are close."""
    with pytest.raises(ConfigError, match=message):
        LLM(str(folder), **{name: 1})


@pytest.mark.parametrize("call", [5, 18])
def test_news_that_cannot_be_taken_fail_alone(
    llm: LLM, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error about the news of one prompt ends that prompt, at a last token too; the others are answered."""
    expected = tokens(llm, PROMPT, [5] * 9)
    with monkeypatch.context() as patched:
        patched.setattr(llm.engine, "_take", before_call(call, llm.engine._take, fault))
        answers = [output.outputs[0] for output in llm.generate([PROMPT] * 9, GREEDY)]
    failed = [answer for answer in answers if answer.finish_reason == "error"]
    assert len(failed) == 1
    assert "could not be taken: RuntimeError: a fault" in str(failed[0].error)
    assert all(answer.token_ids == expected[0] for answer in answers if answer not in failed)
    expect_nothing_held(llm)
    assert tokens(llm, PROMPT, [5] * 9) == expected


def fault() -> None:
    raise RuntimeError("a fault")


def interrupt() -> None:
    """Interrupt the process from the thread of an engine, and wait until the main thread has taken note."""
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.3)


def before_call(
    call: int, function: Callable[..., Any], do: Callable[[], None]
) -> Callable[..., Any]:
    """The function, before one of whose calls something is done."""
    calls = count(1)

    def calling(*arguments: Any, **options: Any) -> Any:
        if next(calls) == call:
            do()
        return function(*arguments, **options)

    return calling


@pytest.mark.parametrize(
    ("part", "call", "ended"),
    [
        ("submit", 1, 0),
        ("submit", 3, 0),
        ("step", 1, 0),
        ("step", 3, 0),
        ("step", 6, 4),
        ("step", 15, 9),
        ("_take", 45, 9),
    ],
)
def test_an_interrupt_at_any_point(
    llm: LLM, part: str, call: int, ended: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While prompts are added, in any step and at the last token: each has its output, and none is left behind."""
    with monkeypatch.context() as patched:
        patched.setattr(llm.engine, part, before_call(call, getattr(llm.engine, part), interrupt))
        with pytest.raises(Interrupted, match=f"{ended} of 9 prompts were answered") as caught:
            llm.generate([PROMPT] * 9, GREEDY)
    reasons = [output.outputs[0].finish_reason for output in caught.value.outputs]
    assert (reasons.count("length"), reasons.count("abort")) == (ended, 9 - ended)
    assert all(len(output.outputs[0].token_ids) == 5 for output in caught.value.outputs[:ended])
    expect_nothing_held(llm)
    assert len(tokens(llm, PROMPT)[0]) == 5


INTERRUPTED = """
import json, sys
from opgraft import SamplingParams
from opgraft.serving.llm import Interrupted
from support.small_models import open_llm

PROMPT = [9, 8, 7, 6, 5]

def telling(output, logits):
    if len(output) == 9:
        print("now", flush=True)
    return logits

def params(tokens, **more):
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **more)

llm = open_llm(sys.argv[1], **{"cache.num_blocks": 4000})
before = llm.generate(PROMPT, params(5))[0].outputs[0].token_ids
each = [params(5), params(9000, logits_processors=[telling]), params(9000)]
try:
    llm.generate([PROMPT] * 3, each)
except Interrupted as interrupt:
    answers = [output.outputs[0] for output in interrupt.outputs]
    message = str(interrupt)
after = llm.generate(PROMPT, params(5))[0].outputs[0].token_ids
pool = llm.engine.core.cache.pool
print(json.dumps({
    "reasons": [answer.finish_reason for answer in answers],
    "tokens": [answer.token_ids[:5] for answer in answers],
    "lengths": [len(answer.token_ids) for answer in answers],
    "message": message, "before": before, "after": after, "free": pool.num_free == pool.num_blocks,
}))
"""


def test_an_interrupt_keeps_what_is_finished(tmp_path: Path, warm_python: str) -> None:
    """A signal in the middle of an answer ends it; what was finished is there, and the LLM answers again."""
    model = write_model(tmp_path / "model", max_position_embeddings=9999)
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [warm_python, "-c", INTERRUPTED, str(model)]
    with subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=120)
    assert (line, process.returncode) == ("now\n", 0), errors
    found = json.loads(rest)
    assert found["reasons"] == ["length", "abort", "abort"]
    assert found["tokens"] == [found["before"]] * 3
    assert found["lengths"][0] == 5
    assert all(9 <= length < 9000 for length in found["lengths"][1:])
    assert found["message"].startswith("1 of 3 prompts were answered")
    assert found["after"] == found["before"]
    assert found["free"]
