"""``LLM`` answers with a real language model as transformers does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.test_answer import ANSWER, PROMPT
from opgraft import SamplingParams
from opgraft.models import find_checkpoint
from opgraft.serving.llm import LLM
from torch import Tensor

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")

GREEDY = SamplingParams(temperature=0, max_tokens=6)
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea, there",
)
QUESTIONS = (PROMPT, "Name three colours.")


@pytest.fixture(scope="module")
def reference() -> tuple[Any, Any]:
    """Tokenizer and model of transformers, from the same file, dequantized."""
    path = find_checkpoint("smollm2")
    place = {"gguf_file": path.name, "local_files_only": True}
    with pytest.MonkeyPatch.context() as patched:
        # Its vocabulary takes seconds to read, and transformers reads it for tokenizer, config and weights.
        patched.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **place)
        return tokenizer, transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, dtype=torch.float32, **place
        )


def generated(reference: tuple[Any, Any], ids: torch.Tensor, count: int = 6) -> list[int]:
    _, model = reference
    tokens = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
    )
    return tokens[0, ids.shape[1] :].tolist()  # type: ignore[no-any-return]


def test_answers_are_those_of_transformers(reference: tuple[Any, Any]) -> None:
    """Texts and chats together, in chunks, and again from what the cache has of them, give the same greedy tokens."""
    tokenizer, _ = reference
    llm = LLM("smollm2", dtype="float32", max_model_len=128, max_num_batched_tokens=8, max_num_seqs=4,
              **{"cache.num_blocks": 24, "cache.block_size": 8, "load.progress": False})  # fmt: skip
    expected = [
        generated(reference, tokenizer(text, return_tensors="pt").input_ids) for text in PROMPTS
    ]
    for _ in range(2):
        outputs = llm.generate(PROMPTS, GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert [output.outputs[0].text for output in outputs] == [
            tokenizer.decode(tokens) for tokens in expected
        ]
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    given = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
        for chat in chats
    ]
    answers = llm.chat(chats, GREEDY)
    assert [answer.prompt_token_ids for answer in answers] == [
        ids.input_ids[0].tolist() for ids in given
    ]
    assert [answer.outputs[0].token_ids for answer in answers] == [
        generated(reference, ids.input_ids) for ids in given
    ]
    assert generated(reference, given[0].input_ids, len(ANSWER)) == ANSWER


@pytest.fixture(scope="module")
def judged() -> Callable[[str, str], tuple[Tensor, Tensor]]:
    """Compute in a dtype, over a cache of one, the likeliest tokens of a text's places, and its tokens' logprobs."""
    text = (Path(__file__).parent / "plain_text.txt").read_text(encoding="utf-8")

    @functools.cache
    def judge(dtype: str, cache: str) -> tuple[Tensor, Tensor]:
        given = {"cache.dtype": cache, "cache.memory_bytes": 1 << 26, "load.progress": False}
        llm = LLM("smollm2", dtype=dtype, max_model_len=768, **given)
        (output,) = llm.generate(
            text, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
        )
        assert output.prompt_logprobs is not None
        places = [place for place in output.prompt_logprobs if place is not None]
        likeliest = [max(place, key=lambda token: place[token].logprob) for place in places]
        tokens = zip(places, output.prompt_token_ids[1:], strict=True)
        return torch.tensor(likeliest), torch.tensor(
            [place[token].logprob for place, token in tokens]
        )

    return judge


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "cache", "agreement", "error"), [
    ("float32", "int8", 0.95, 0.05),
    ("bfloat16", "auto", 0.95, 0.06),
    ("float32", "fp8", 0.93, 0.1),
    ("bfloat16", "int8", 0.93, 0.08),
])  # fmt: skip
def test_accuracy_of_caches_of_codes(
    judged: Callable[[str, str], tuple[Tensor, Tensor]],
    dtype: str,
    cache: str,
    agreement: float,
    error: float,
) -> None:
    """Over 8 bits a text's likeliest tokens are nearly always those of float32, and its logprobs near theirs."""
    tokens, logprobs = judged("float32", "auto")
    found, found_logprobs = judged(dtype, cache)
    assert len(tokens) > 200
    assert (found == tokens).double().mean() > agreement
    assert (found_logprobs - logprobs).abs().mean() < error
