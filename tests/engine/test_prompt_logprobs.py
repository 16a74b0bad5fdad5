"""Log-probabilities of prompts: those of transformers, in memory that does not grow with the prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft.engine.core import EngineCore
from opgraft.engine.request import Request
from opgraft.engine.runner.largest_step import largest_step
from opgraft.engine.sampling import TokenLogprobs
from opgraft.engine.sampling.logprobs import ROWS_AT_ONCE, token_logprobs
from opgraft.engine.sampling_params import SamplingParams
from support.engines import engine, news, prompts
from support.random_decoders import written
from torch.utils._python_dispatch import TorchDispatchMode

VOCABULARY = 4000
LENGTH = 200
ASKING = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2, logprobs=2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with a decoder of small layers and many tokens, and transformers' model of it."""
    folder = tmp_path_factory.mktemp("prompt logprobs") / "llama"
    return folder, written("Llama", folder, vocab_size=VOCABULARY, max_position_embeddings=512)


def opened(checkpoint: tuple[Path, Any], tokens: int) -> EngineCore:
    return engine(checkpoint[0], max_model_len=256, max_num_batched_tokens=tokens)


def given(core: EngineCore, prompt: list[int]) -> list[TokenLogprobs]:
    core.add([Request("a", prompt, ASKING)])
    (found,) = [
        output.prompt_logprobs for output in news(core) if output.prompt_logprobs is not None
    ]
    return list(found)


class Largest(TorchDispatchMode):
    """Notes the elements of the largest tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, list | tuple) else [found]:
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.numel())
        return found


@pytest.mark.parametrize("tokens", [16, ROWS_AT_ONCE + 6, 256])
def test_those_of_transformers(checkpoint: tuple[Path, Any], tokens: int) -> None:
    """Whole, and in chunks that are cut elsewhere than the parts, each token has its log-probability and rank."""
    prompt = prompts(LENGTH)[0]
    found = given(opened(checkpoint, tokens), prompt)
    with torch.no_grad():
        exact = checkpoint[1](torch.tensor([prompt])).logits[0].double().log_softmax(-1)
    assert [each.token for each in found] == prompt[1:]
    for each, row in zip(found, exact, strict=False):
        assert each.logprob == pytest.approx(float(row[each.token]), abs=1e-4)
        assert [value for _, value in each.top] == pytest.approx(
            row.topk(2).values.tolist(), abs=1e-4
        )


def test_memory_does_not_grow_with_the_prompt(checkpoint: tuple[Path, Any]) -> None:
    """No tensor of a step that takes a whole prompt has more rows of logits than are computed at a time."""
    core = opened(checkpoint, 256)
    with Largest() as largest:
        given(core, prompts(LENGTH)[0])
    assert VOCABULARY * ROWS_AT_ONCE <= largest.elements < VOCABULARY * (ROWS_AT_ONCE + 1)


def test_rows_that_are_sampled() -> None:
    """Of a batch of any size, the same come as row by row, and temporary tensors are of a few rows."""
    logits = torch.randn(2 * ROWS_AT_ONCE + 5, VOCABULARY)
    tokens = torch.randint(VOCABULARY, (len(logits),))
    counts = [row % 4 for row in range(len(logits))]
    with Largest() as largest:
        found = token_logprobs(logits, tokens, counts)
    assert largest.elements == VOCABULARY * ROWS_AT_ONCE
    for row, each in enumerate(found):
        (alone,) = token_logprobs(
            logits[row : row + 1], tokens[row : row + 1], counts[row : row + 1]
        )
        assert each.logprob == pytest.approx(alone.logprob, abs=1e-5)
        assert (each.token, each.rank, [token for token, _ in each.top]) == (
            alone.token,
            alone.rank,
            [token for token, _ in alone.top],
        )


def test_the_largest_step_has_them(
    checkpoint: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that a device's cache leaves room for computes log-probabilities of whole prompts and of its samples."""
    runner = opened(checkpoint, 256).executor.worker.runner
    step = largest_step(4, 256, 256, runner.layout.block_size, 1)
    rows = []
    compute_logits = runner.model.compute_logits
    monkeypatch.setattr(
        runner.model,
        "compute_logits",
        lambda states: rows.append(len(states)) or compute_logits(states),
    )
    result = runner.execute(step)
    assert [len(found) for found in result.prompt_logprobs.values()] == [
        each.count - 1 for each in step.sequences
    ]
    assert len(result.logprobs) == len(step.sequences) == rows[-1]
    assert rows[:4] == [ROWS_AT_ONCE] * 3 + [step.sequences[0].count - 3 * ROWS_AT_ONCE]
