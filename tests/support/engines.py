"""Engines over small checkpoints, their requests, and the logits that transformers gives for the same tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft.config import CacheConfig, LoadConfig, ModelConfig, OpgraftConfig, SchedulerConfig
from opgraft.engine.core import EngineCore, EngineOutput
from opgraft.engine.request import Request
from opgraft.engine.sampling_params import SamplingParams
from opgraft.serving.llm import LLM
from opgraft.serving.text_engine import TextEngine
from torch import Tensor

BLOCK = 4
"""Tokens in a block."""


def settings(
    folder: Path, *, num_blocks: int = 200, max_model_len: int = 64, **scheduler: Any
) -> OpgraftConfig:
    """An engine's settings with small blocks."""
    return OpgraftConfig(
        model=ModelConfig(name=str(folder), dtype="float32", max_model_len=max_model_len),
        cache=CacheConfig(block_size=BLOCK, num_blocks=num_blocks),
        scheduler=SchedulerConfig(**{"max_num_seqs": 4, **scheduler}),
        load=LoadConfig(progress=False),
    )


def replaced(given: OpgraftConfig, **sections: dict[str, Any]) -> OpgraftConfig:
    """Settings with others in some sections."""
    changed = {
        name: dataclasses.replace(getattr(given, name), **values)
        for name, values in sections.items()
    }
    return dataclasses.replace(given, **changed)


def engine(folder: Path, **given: Any) -> EngineCore:
    return EngineCore(settings(folder, **given))


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(3, 99, (length,), generator=generator).tolist() for length in lengths]


class Recorder:
    """A logits processor that notes the logits after each output, and leaves them as they are."""

    def __init__(self) -> None:
        self.logits: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, output: list[int], logits: Tensor) -> Tensor:
        self.logits[tuple(output)] = logits.clone()
        return logits


def recorded(
    name: str, prompt: Sequence[int], max_tokens: int = 12, **params: Any
) -> tuple[Request, Recorder]:
    """A request, greedy unless it says otherwise, and the recorder of its logits."""
    recorder = Recorder()
    given = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **params}
    return Request(name, prompt, SamplingParams(**given, logits_processors=[recorder])), recorder


def expect_right(model: Any, request: Request, recorder: Recorder) -> None:
    """See that a request has the tokens that transformers' model finds likeliest, by logits within 1e-4 of its own."""
    assert len(request.output) == request.params.max_tokens
    expected = plain_logits(model, request.prompt, request.output)
    if request.params.greedy:
        assert request.output == expected.argmax(-1).tolist()
    found = torch.stack(
        [recorder.logits[tuple(request.output[:i])] for i in range(len(request.output))]
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@torch.no_grad()
def plain_logits(model: Any, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
    """The logits of transformers' model for each token of an output, by one call without a cache."""
    tokens = torch.tensor([[*prompt, *output[:-1]]])
    logits: Tensor = model(tokens, use_cache=False).logits[0, len(prompt) - 1 :]
    return logits


def news(core: EngineCore) -> Iterator[EngineOutput]:
    while core.has_work:
        yield from core.step()


def serve(core: EngineCore, requests: Sequence[Request]) -> None:
    """Serve all requests; none may fail, and every block is free afterwards."""
    core.add(requests)
    for output in news(core):
        assert output.error is None
    expect_empty(core)


def copies_of(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """A list that fills with the blocks that steps copy."""
    schedule, copies = core.scheduler.schedule, []

    def noting() -> Any:
        step = schedule()
        copies.extend(step.copies)
        return step

    monkeypatch.setattr(core.scheduler, "schedule", noting)
    return copies


def expect_empty(core: EngineCore) -> None:
    """See that an engine without work holds nothing of the requests that it had."""
    core.step()  # which tells the runner of the last ones
    pool, runner = core.cache.pool, core.executor.worker.runner
    assert pool.num_free == pool.num_blocks
    assert not any(pool.references(block) for block in range(pool.num_blocks))
    assert not any((core.cache._tables, core.scheduler._requests, core.scheduler.under_way.removed))
    assert not any((runner.batch._sequences, runner.sampling._all, runner._prompt_logprobs))
    assert sorted(runner.batch._rows) == list(range(core.scheduler.config.max_num_seqs))


def in_its_thread(llm: LLM, function: Callable[[], None]) -> None:
    """Call a function in the thread of a model's engine, which else takes the steps of new requests itself."""
    llm._replicas.each[0].call(function).result()


def add(engine: TextEngine, name: str, prompt: Any, params: SamplingParams, **options: Any) -> Any:
    """Have a request wait in an engine that no thread steps, and return its output."""
    return engine.submit(engine.inputs.prepare(name, prompt, params, **options))
