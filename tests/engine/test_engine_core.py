"""The engine gives the tokens that transformers gives, whatever else is in the batch, and outlives what fails."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft.config import CacheConfig, LoadConfig, ModelConfig, OpgraftConfig, SchedulerConfig
from opgraft.engine.engine_core import EngineCore, EngineOutput
from opgraft.engine.request import Request
from opgraft.engine.sampling_params import SamplingParams
from random_decoders import DECODERS, written

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    folder = tmp_path_factory.mktemp("engine")
    return {name: (folder / name, written(family, folder / name, **v)) for name, (family, v) in DECODERS.items()}


def engine(folder: Path, *, num_blocks: int = 200, max_model_len: int = 64, **scheduler: Any) -> EngineCore:
    """An engine with blocks of four tokens."""
    return EngineCore(
        OpgraftConfig(
            model=ModelConfig(name=str(folder), dtype="float32", max_model_len=max_model_len),
            cache=CacheConfig(block_size=4, num_blocks=num_blocks),
            scheduler=SchedulerConfig(**{"max_num_seqs": 4, **scheduler}),
            load=LoadConfig(progress=False),
        )
    )


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(3, 99, (length,), generator=generator).tolist() for length in lengths]


def run(core: EngineCore, requests: Sequence[Request]) -> dict[str, list[int]]:
    """Serve all requests; none may fail."""
    core.add(requests)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for output in news(core):
        assert output.error is None
        assert output.token is not None
        tokens[output.request_id].append(output.token)
    assert core.cache.pool.num_free == core.cache.pool.num_blocks
    return tokens


def news(core: EngineCore) -> Iterator[EngineOutput]:
    while core.has_work:
        yield from core.step()


@torch.no_grad()
def greedy(model: Any, prompt: Sequence[int], count: int = 12) -> list[int]:
    """The tokens that transformers' model finds likeliest, each computed without a cache."""
    tokens = torch.tensor([prompt])
    for _ in range(count):
        following = model(tokens, use_cache=False).logits[:, -1:].argmax(-1)
        tokens = torch.cat((tokens, following), dim=1)
    return tokens[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", DECODERS)
def test_tokens_are_those_of_transformers(checkpoints: dict[str, tuple[Path, Any]], name: str) -> None:
    """Prompts come in chunks beside other requests, and some are computed anew as the cache is small."""
    folder, model = checkpoints[name]
    given = prompts(1, 19, 7, 30, 11, 25)
    core = engine(folder, num_blocks=48, max_num_batched_tokens=9)
    found = run(core, [Request(str(i), prompt, GREEDY) for i, prompt in enumerate(given)])
    assert [found[str(i)] for i in range(len(given))] == [greedy(model, prompt) for prompt in given]
