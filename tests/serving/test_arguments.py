"""Arguments of ``LLM`` and ``AsyncLLM``: taken as meant, or refused by name before anything is computed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft import AsyncLLM, SamplingParams
from opgraft.errors import ConfigError, EngineError, InputError, ModelError, RequestError
from opgraft.serving.llm import LLM
from support.engines import expect_empty
from support.small_models import CONTEXT, VOCABULARY, open_llm, write_model

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
PROMPT = [9, 8, 7, 6, 5]
TEMPLATE = "{% for m in messages %}{{ m.content }};{% endfor %}"


@pytest.fixture(scope="module")
def folder(trained: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_model(tmp_path_factory.mktemp("arguments") / "model", trained)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return open_llm(folder)


@pytest.fixture(scope="module")
def ordered(folder: Path) -> LLM:
    return open_llm(folder, **{"scheduler.policy": "priority", "max_num_seqs": 1})


def tokens(llm: LLM, *prompts: Any, **options: Any) -> list[list[int]]:
    return [
        output.outputs[0].token_ids for output in llm.generate(list(prompts), GREEDY, **options)
    ]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (5, "prompts is 5: give text, a list of token ids"),
        (None, "prompts is None: give text"),
        (torch.tensor([1, 2]), "prompts is of the type Tensor: give text"),
        ((p for p in ["a"]), "prompts is of the type generator: give text"),
        ({"a", "b"}, "prompts is of the type set: give text"),
        (b"text", "prompts is of the type bytes: give text"),
        (["a", 5, "b"], "prompt 2 of 3 is int: give text, a list of token ids"),
        (["a", None], "prompt 2 of 2 is NoneType: give text"),
        (
            [PROMPT, [5] * 64, PROMPT],
            r"prompt 2 of 3 has 64 tokens .* shorten it by 1 token, or raise",
        ),
        ([5] * 70, r"the prompt has 70 tokens .* shorten it by 7 tokens, or raise"),
        (
            [{"prompt": "a"}, {"text": "a"}],
            "prompt 2 of 2 has the keys 'text': give either 'prompt' or 'prompt_token",
        ),
        ({"prompt": [1]}, "the prompt has 'prompt' of the type list: give text"),
        (
            {"prompt_token_ids": "a"},
            "the prompt has 'prompt_token_ids' of the type str: give a list of token ids",
        ),
        ({"prompt": "a", "cache_salt": 5}, "cache_salt is 5: give a text, or None"),
    ],
)
def test_prompts_of_another_form(llm: LLM, prompts: Any, message: str) -> None:
    """The error says what was given, which of several it is, by its place, and what is expected."""
    with pytest.raises(InputError, match=message):
        llm.generate(prompts, GREEDY)
    expect_empty(llm.engine.core)


def test_arrays_are_no_prompts(llm: LLM) -> None:
    """An array of numpy has no truth value, and is refused as what it is."""
    numpy = pytest.importorskip("numpy")
    with pytest.raises(InputError, match="prompts is of the type ndarray: give text"):
        llm.generate(numpy.array([1, 2, 3]), GREEDY)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"temperature": 0},
            r"sampling_params is of the type dict: give SamplingParams\(\*\*params\)",
        ),
        (5, r"sampling_params is 5: give SamplingParams\(\.\.\.\)"),
        (
            [GREEDY, {"n": 1}],
            r"sampling_params is of the type dict: give SamplingParams\(\*\*params\)",
        ),
    ],
)
def test_params_of_another_form(llm: LLM, params: Any, message: str) -> None:
    """What is no SamplingParams is refused, alone and in a list, with what to write instead."""
    with pytest.raises(InputError, match=message):
        llm.generate([PROMPT, PROMPT], params)
    with pytest.raises(InputError, match="sampling_params is"):
        asyncio.run(first_of(llm, params))
    expect_empty(llm.engine.core)


async def first_of(llm: LLM, params: Any) -> None:
    llm.engine.inputs.prepare("x", PROMPT, params)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ({"role": "user", "content": "a"}, "messages is of the type dict: give a list of messages"),
        ("hello", "messages is of the type str: give a list of messages"),
        (5, "messages is 5: give a list of messages"),
        ([[{"role": "user", "content": "a"}], 5], "chat 2 of 2 is 5: give a list of messages"),
        ([[{"role": "user", "content": "a"}], []], "chat 2 of 2: the chat has no messages"),
        (
            [[{"role": "user", "content": "a"}], [{"role": "user", "content": "a " * 99}]],
            "chat 2 of 2 has .* tokens",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            r"messages\[0\].content\[0\] is 'image_url': the model",
        ),
    ],
)
def test_chats_of_another_form(llm: LLM, messages: Any, message: str) -> None:
    """The same for chats."""
    with pytest.raises(InputError, match=message):
        llm.chat(messages, GREEDY)
    expect_empty(llm.engine.core)


def test_content_in_parts(llm: LLM) -> None:
    """Parts of text, as OpenAI's clients send them, are lines of one text."""
    parts = [{"type": "text", "text": "a cat"}, {"type": "text", "text": "a dog"}]
    (output,) = llm.chat([{"role": "user", "content": parts}], GREEDY)
    assert output.prompt == "a cat\na dog;"


def test_priorities_order_the_answers(ordered: LLM) -> None:
    """Of prompts with a place for one at a time, those of the lowest number are answered first."""
    priorities = [3, 1, 2]
    outputs = ordered.generate([PROMPT, [3, 4], [5, 6]], GREEDY, priority=priorities)
    ended = [output.metrics.last_token for output in outputs if output.metrics is not None]
    assert sorted(range(3), key=lambda i: ended[i] or 0) == [1, 2, 0]
    (output,) = ordered.chat([{"role": "user", "content": "a"}], GREEDY, priority=-1)
    assert output.finished


def test_priorities_that_have_no_effect(llm: LLM, ordered: LLM) -> None:
    """They need the policy; as many as prompts, each a whole number."""
    with pytest.raises(
        RequestError, match=r"priority is 1, and scheduler.policy is fcfs.*set scheduler.policy"
    ) as raised:
        tokens(llm, PROMPT, priority=1)
    assert raised.value.field == "priority"
    with pytest.raises(RequestError, match="2 prompts come with 1 priorities"):
        tokens(ordered, PROMPT, PROMPT, priority=[1])
    with pytest.raises(RequestError, match="priority is 'high': give an integer") as raised:
        tokens(ordered, PROMPT, priority="high")
    assert raised.value.field == "priority"
    expect_empty(ordered.engine.core)


def test_prompts_with_a_salt_share_nothing(llm: LLM) -> None:
    """A prompt's own salt, beside text or tokens, keeps its blocks from those with another."""
    prompt = [7] * 12
    cached = []
    for salt in ("a", "b", "a"):
        before = llm.stats().counters.prefix_hits
        llm.generate({"prompt_token_ids": prompt, "cache_salt": salt}, GREEDY)
        cached.append(llm.stats().counters.prefix_hits - before)
    assert cached == [0, 0, 8]
    assert llm.generate({"prompt": "a cat"}, GREEDY)[0].prompt == "a cat"


def test_two_salts(llm: LLM) -> None:
    """The argument's salt is as good as the prompt's; where both are given and differ, neither wins."""
    prompt = {"prompt": "a cat", "cache_salt": "a"}
    both = llm.engine.inputs.prepare("x", prompt, GREEDY, cache_salt="a")
    alone = [
        llm.engine.inputs.prepare("x", "a cat", GREEDY, cache_salt="a"),
        llm.engine.inputs.prepare("x", prompt, GREEDY),
    ]
    assert {each.growing["x"].request.cache_salt for each in (both, *alone)} == {"a"}
    with pytest.raises(
        RequestError,
        match=r"has the cache_salt 'a', and the argument of that name is 'b': leave one out",
    ) as raised:
        llm.engine.inputs.prepare("x", prompt, GREEDY, cache_salt="b")
    assert raised.value.field == "cache_salt"


BAD: dict[str, Any] = {"priority": "high", "cache_salt": 5, "request_id": 5, "arrival": "now"}


@pytest.mark.parametrize("field", BAD)
def test_a_bad_argument_of_one_reader_harms_no_other(folder: Path, field: str) -> None:
    """It is refused by name when the request is made, and the engine answers the others."""

    async def run() -> None:
        settings = {"cache.num_blocks": 100, "cache.block_size": 4, "load.progress": False}
        async with AsyncLLM(
            str(folder), dtype="float32", **settings, **{"scheduler.policy": "priority"}
        ) as engine:
            going = engine.generate(PROMPT, GREEDY, priority=1)
            last = await anext(going)
            with pytest.raises(RequestError, match=f"{field} is {BAD[field]!r}: give") as raised:
                await anext(engine.generate(PROMPT, GREEDY, **{field: BAD[field]}))
            assert raised.value.field == field
            async for output in going:
                last = output
            assert len(last.outputs[0].token_ids) == 5
            await engine.check_health()

    asyncio.run(run())


def test_a_model_that_was_shut_down(folder: Path) -> None:
    """It answers nothing more, and says so; a with block ends with it."""
    with open_llm(folder) as llm:
        assert len(tokens(llm, PROMPT)[0]) == 5
    with pytest.raises(EngineError, match="the engine was shut down: make a new one"):
        llm.generate([PROMPT], GREEDY)


def test_an_encoder(tmp_path: Path) -> None:
    """Texts of another form, one that is too long, an engine for answers, and a model that was shut down."""
    with LLM("minilm", **{"load.progress": False}) as encoder:
        with pytest.raises(InputError, match="texts is 5: give text"):
            encoder.embed(5)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match=r"or have LLM\.embed cut it with truncate=True"):
            encoder.embed("cat " * 600)
        assert len(encoder.embed({"prompt": "cat " * 600}, truncate=True)[0].prompt_token_ids) > 100
    with pytest.raises(EngineError, match="the engine was shut down"):
        encoder.embed("a cat")


def test_an_encoder_in_an_event_loop() -> None:
    """AsyncLLM embeds what LLM embeds, also beside each other and after a cancelled call; it answers no prompt."""
    texts = ["a cat", "the train to the coast", "bread"]
    with LLM("minilm", **{"load.progress": False}) as llm:
        expected = [output.embedding for output in llm.embed(texts)]

    async def use() -> None:
        async with AsyncLLM("minilm", **{"load.progress": False}) as encoder:
            cancelled = asyncio.create_task(encoder.embed(texts * 20))
            await asyncio.sleep(0)
            cancelled.cancel()
            each = await asyncio.gather(*(encoder.embed([text]) for text in texts))
            for (found,), wanted in zip(each, expected, strict=True):
                assert found.embedding == pytest.approx(wanted, abs=1e-5)
            with pytest.raises(ModelError, match=r"LLM\.embed gives the vectors of texts"):
                encoder.generate("a cat")
            assert (encoder.stats().running, encoder.stats().waiting) == (0, 0)

    asyncio.run(use())


def test_names_and_values_of_vllm(llm: LLM) -> None:
    """All logprobs, an output up to the context, and tokens that alone are allowed."""
    params = SamplingParams(
        top_k=-1,
        max_tokens=None,
        logprobs=-1,
        allowed_token_ids=[5, 6],
        ignore_eos=True,
        seed=1,
        prompt_logprobs=-1,
    )
    (output,) = llm.generate(PROMPT, params)
    answer = output.outputs[0]
    assert len(answer.token_ids) == CONTEXT - len(PROMPT)
    assert set(answer.token_ids) == {5, 6}
    assert {len(each) for each in answer.logprobs or ()} == {VOCABULARY}
    with pytest.raises(
        RequestError, match="allowed_token_ids has the token id 400, and the vocabulary has 400"
    ):
        llm.generate(PROMPT, SamplingParams(allowed_token_ids=[VOCABULARY]))


def test_the_memory_setting_of_vllm(folder: Path) -> None:
    """It means something else here, so the error names what to set."""
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization.*cache\.memory_share"):
        open_llm(folder, gpu_memory_utilization=0.9)
