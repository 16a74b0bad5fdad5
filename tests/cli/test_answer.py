"""``opgraft run MODEL PROMPT`` answers with a real language model."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch
from opgraft.models import find_checkpoint

transformers = pytest.importorskip("transformers")

PROMPT = "What is gravity?"
NEW = 8


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """What transformers generates from the same file, dequantized."""
    path = find_checkpoint("smollm2")
    place = {"gguf_file": path.name, "local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **place)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **place)
    messages = [{"role": "user", "content": PROMPT}]
    given = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**given, max_new_tokens=NEW, do_sample=False)[0, given["input_ids"].shape[1] :].tolist()
    return list(tokens)


def test_the_tokens_are_those_of_transformers(cli, expected: list[int]) -> None:
    """Greedy tokens of SmolLM2 agree, and the JSON is what its schema says."""
    result = cli("run", "smollm2", PROMPT, "--max-tokens", str(NEW), "--json")
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert answer["tokens"] == expected
    assert answer["answer"].startswith("Gravity is")
    validator = runpy.run_path(str(Path(__file__).with_name("test_schemas.py")))["validator"]
    validator("opgraft.answer/1").validate(answer)


def test_text_is_the_answer_alone(cli) -> None:
    """Stdout has the answer, stderr what it took."""
    result = cli("run", "smollm2", PROMPT, "--max-tokens", "3", "--dtype", "bfloat16")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "Gravity is\n"
    assert "3 of answer" in result.stderr


def test_prompts_and_lines_exclude_each_other(cli) -> None:
    """A prompt beside a comparison is a usage error."""
    result = cli("run", "smollm2", PROMPT, "--compare")
    assert result.returncode == 2
    assert "without --input and --compare" in result.stderr
