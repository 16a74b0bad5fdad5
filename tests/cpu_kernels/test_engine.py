"""The engine over the plugin's pages: keys by groups of tokens, pairs of bfloat16, scales behind groups of codes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft.config import CacheConfig
from opgraft.engine.core import EngineCore
from opgraft.engine.request import Request
from support.engines import copies_of, plain_logits, prompts, recorded, serve, settings
from support.random_decoders import written

BLOCK, LONGEST, NEW = 16, 96, 16
LAYERS = {
    "llama": ("Llama", {"head_dim": 32}),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 32,
            "sliding_window": 24,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
ERRORS = {
    ("float32", "auto"): 1e-4,
    ("float32", "int8"): 0.02,
    ("float32", "fp8"): 0.1,
    ("bfloat16", "auto"): 0.03,
    ("bfloat16", "int8"): 0.04,
    ("bfloat16", "fp8"): 0.1,
}
"""By the dtypes of model and cache, bounds on the error of logits, in standard deviations of logits."""

dtypes = pytest.mark.parametrize(("dtype", "cache"), ERRORS)
families = pytest.mark.parametrize("checkpoint", LAYERS, indirect=True)


@pytest.fixture(scope="module")
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    """A folder with a family's random weights, and transformers' model of them in float32."""
    family, values = LAYERS[request.param]
    folder = tmp_path_factory.mktemp("engine over the plugin") / request.param
    return folder, written(family, folder, **values, max_position_embeddings=128)


def engine_of(
    folder: Path, dtype: str, cache: str, *, num_blocks: int = 100, **scheduler: Any
) -> EngineCore:
    given = settings(folder, max_model_len=LONGEST, **scheduler)
    core = EngineCore(
        dataclasses.replace(
            given,
            model=dataclasses.replace(given.model, dtype=dtype),
            cache=CacheConfig(block_size=BLOCK, num_blocks=num_blocks, dtype=cache),
        )
    )
    for name, pages in core.executor.worker.runner.caches.items():
        assert pages.shape[1:4] == (2, 2, BLOCK // 16), f"{name} is not in the plugin's layout"
        assert (pages.dtype in (torch.int8, torch.uint8)) == (cache != "auto")
    return core


def expect_near(model: Any, request: Request, recorder: Any, bound: float) -> None:
    """See that the logits of a request are as near those of transformers as the dtypes let them be."""
    assert len(request.output) == request.params.max_tokens
    expected = plain_logits(model, request.prompt, request.output)
    found = torch.stack(
        [recorder.logits[tuple(request.output[:i])] for i in range(len(request.output))]
    )
    assert ((found - expected).square().mean().sqrt() / expected.std()) < bound


@families
@dtypes
def test_in_chunks_after_preemption_and_from_a_prefix(
    plugin: Path, checkpoint: tuple[Path, Any], dtype: str, cache: str
) -> None:
    """However a token came to be computed, its logits are near those of transformers, as alone."""
    folder, model = checkpoint
    limits = {"max_num_batched_tokens": 21, "max_num_seqs": 8}
    room = engine_of(folder, dtype, cache, **limits).cache.most_blocks(LONGEST, 21)
    core = engine_of(folder, dtype, cache, num_blocks=room, **limits)
    core.scheduler._reserve = lambda: 0  # type: ignore[method-assign]  # which otherwise prevents most preemptions
    pairs = [
        recorded(str(i), prompt, NEW)
        for i, prompt in enumerate(prompts(14, 15, 3, 13, 12, 40, 31, 76, 2, 60))
    ]
    serve(core, [request for request, _ in pairs])
    assert any(request.num_preemptions for request, _ in pairs)
    again, reused = recorded("again", pairs[-1][0].prompt, NEW)
    serve(core, [again])
    assert again.num_cached
    for request, recorder in (*pairs, (again, reused)):
        expect_near(model, request, recorder, ERRORS[dtype, cache])
    if dtype == "float32":
        alone = engine_of(folder, dtype, cache, max_num_seqs=1)
        for request, _ in pairs:
            single, _ = recorded("single", request.prompt, NEW)
            serve(alone, [single])
            assert single.output == request.output


@families
@dtypes
@pytest.mark.parametrize("length", [40, 33, 5])
def test_several_answers(
    plugin: Path,
    checkpoint: tuple[Path, Any],
    dtype: str,
    cache: str,
    length: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Siblings go on from copies of a block that is partly full, its scales and pairs of tokens with it."""
    folder, model = checkpoint
    prompt = prompts(length)[0]
    together, recorder = recorded("together", prompt, NEW, temperature=1, seed=5, n=3)
    core = engine_of(folder, dtype, cache)
    copies = copies_of(core, monkeypatch)
    siblings = together.split()
    serve(core, siblings)
    assert [sibling.num_cached for sibling in siblings] == [0, length - 1, length - 1]
    assert len(copies) == (2 * len(core.cache.kinds) if (length - 1) % BLOCK else 0)
    assert len({tuple(sibling.output) for sibling in siblings}) == 3
    for sibling in siblings:
        expect_near(model, sibling, recorder, ERRORS[dtype, cache])
