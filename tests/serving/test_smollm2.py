"""``LLM`` answers with a real language model as transformers does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opgraft import SamplingParams
from opgraft.models import find_checkpoint
from opgraft.serving.llm import LLM

transformers = pytest.importorskip("transformers")

GREEDY = SamplingParams(temperature=0, max_tokens=10)
PROMPTS = ("The capital of France is", "def fibonacci(n):\n", "Once upon a time, in a small village by the sea, there")
QUESTIONS = ("What is gravity?", "Name three colours.")


@pytest.fixture(scope="module")
def reference() -> tuple[Any, Any]:
    """Tokenizer and model of transformers, from the same file, dequantized."""
    path = find_checkpoint("smollm2")
    place = {"gguf_file": path.name, "local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **place)
    return tokenizer, transformers.AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **place)


def generated(reference: tuple[Any, Any], ids: torch.Tensor) -> list[int]:
    _, model = reference
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False)
    return tokens[0, ids.shape[1] :].tolist()  # type: ignore[no-any-return]


def test_answers_are_those_of_transformers(reference: tuple[Any, Any]) -> None:
    """Texts and chats together, in chunks, and again from what the cache has of them, give the same greedy tokens."""
    tokenizer, _ = reference
    llm = LLM("smollm2", dtype="float32", max_model_len=128, max_num_batched_tokens=8, max_num_seqs=4,
              **{"cache.num_blocks": 24, "cache.block_size": 8, "load.progress": False})  # fmt: skip
    expected = [generated(reference, tokenizer(text, return_tensors="pt").input_ids) for text in PROMPTS]
    for _ in range(2):
        outputs = llm.generate(PROMPTS, GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert [output.outputs[0].text for output in outputs] == [tokenizer.decode(tokens) for tokens in expected]
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    given = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt") for chat in chats]
    answers = llm.chat(chats, GREEDY)
    assert [answer.prompt_token_ids for answer in answers] == [ids.input_ids[0].tolist() for ids in given]
    assert [answer.outputs[0].token_ids for answer in answers] == [generated(reference, ids.input_ids) for ids in given]
    assert answers[0].outputs[0].text.startswith("Gravity is")
