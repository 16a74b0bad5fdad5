"""``opgraft run MODEL PROMPT`` answers with a real language model."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest
from click.testing import CliRunner
from opgraft.cli import run

pytest.importorskip("transformers")

PROMPT = "What is gravity?"
ANSWER = [22007, 6463, 314, 253, 4959, 1909, 281, 6944]
"""The greedy tokens of transformers for that question, as ``serving/test_smollm2.py`` checks."""
SMALL = ("--cache.num_blocks", "300", "--load.progress", "false")


def test_the_tokens_are_those_of_transformers(cli) -> None:
    """Greedy tokens of SmolLM2 agree, beside another prompt, and the JSON is what its schema says."""
    asked = ("smollm2", PROMPT, "Name a colour.")
    result = cli("run", *asked, "--max-tokens", str(len(ANSWER)), "--json", *SMALL)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    first, second = report["answers"]
    assert first["tokens"] == ANSWER
    assert first["answer"].startswith("Gravity is")
    assert first["finish_reason"] == "length"
    assert second["prompt"] == "Name a colour."
    assert {"attention", "rms_norm"} <= {row["op"] for row in report["ops"]}
    validator = runpy.run_path(str(Path(__file__).with_name("test_schemas.py")))["validator"]
    assert [error.message for error in validator("opgraft.answer/2").iter_errors(report)] == []


def test_text_is_the_answer_alone(cli, causal_folder: Path) -> None:
    """Of one prompt stdout has the answer, stderr what the cache holds and what it took."""
    result = cli(
        "run", str(causal_folder), "the cat", "--max-tokens", "3", "--dtype", "bfloat16", *SMALL
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 1
    assert "the cache holds 9,600 tokens in 300 blocks of 32" in result.stderr
    assert re.search(
        r"2 tokens of prompt, [123] of answer in [\d.]+ s on cpu: [\d.]+ tokens per second",
        result.stderr,
    )


def test_several_prompts_are_shown_with_their_answers_and_the_kernels(
    cli, causal_folder: Path
) -> None:
    """Each prompt stands above its answer, whose terminal sequences are escaped; the table of kernels follows."""
    result = cli(
        "run", str(causal_folder), "the cat", "a dog \x1b[31m", "--max-tokens", "3", *SMALL
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "> the cat"
    assert lines[3] == "> a dog \\x1b[31m"
    assert any(line.split()[:3] == ["5", "rms_norm", "RMSNorm.forward_native"] for line in lines)


def test_temperature_and_seed_are_heeded(cli, causal_folder: Path) -> None:
    """Sampled answers are those of the seed."""
    options = ("the cat", "--temperature", "5", "--max-tokens", "20", *SMALL)
    first, again, other = (
        cli("run", str(causal_folder), *options, "--model.seed", seed).stdout
        for seed in ("1", "1", "2")
    )
    assert first == again != other


def test_a_prompt_that_fits_nowhere_is_an_error(cli, causal_folder: Path) -> None:
    """A prompt beyond the context is an error that names the limit, and so is a cache too small for the context."""
    result = cli("run", str(causal_folder), "the cat " * 40, *SMALL, "--model.max_model_len", "64")
    assert result.returncode == 2
    assert "80 tokens" in result.stderr
    assert "maximum context length is 64 tokens" in result.stderr
    result = cli("run", str(causal_folder), "the cat", "--cache.num_blocks", "3")
    assert result.returncode == 2
    assert "the cache has room for 3 blocks" in result.stderr


def test_an_encoder_embeds_prompts(cli) -> None:
    """For each text the nearest is printed; JSON has the vectors, as its schema says."""
    texts = ("The cat sleeps.", "A train leaves at noon.", "A kitten naps.")
    result = cli("run", "minilm", *texts)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[:2] == ["The cat sleeps.", "  -> A kitten naps."]
    report = json.loads(cli("run", "minilm", *texts, "--json").stdout)
    assert [row["nearest"] for row in report["embeddings"]][::2] == [texts[2], texts[0]]
    assert len(report["embeddings"][0]["embedding"]) == 384
    validator = runpy.run_path(str(Path(__file__).with_name("test_schemas.py")))["validator"]
    assert [error.message for error in validator("opgraft.embeddings/1").iter_errors(report)] == []


def test_the_model_is_named_once() -> None:
    """A second name as a setting is a usage error."""
    result = CliRunner().invoke(run.command, ["smollm2", PROMPT, "--model.name", "minilm"])
    assert result.exit_code == 2
    assert "leave --model.name out" in result.stderr
