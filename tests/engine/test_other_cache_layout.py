"""The toy NPU replaces ``Attention`` with a cache in a layout of its own, and the engine runs on it."""

from __future__ import annotations

from pathlib import Path

import pytest
from opgraft import current_platform
from opgraft.ops.attention import Attention
from support.engines import engine, expect_right, prompts, recorded, serve
from support.random_decoders import DECODERS, written


@pytest.mark.parametrize(("name", "num_blocks"), [("llama", 12), ("gemma3", 24)])
def test_the_engine_runs_on_another_layout(
    toy_npu: Path, tmp_path: Path, name: str, num_blocks: int
) -> None:
    """Chunks, reused prefixes, preemption and copies for siblings give transformers' tokens: no part looks inside."""
    family, values = DECODERS[name]
    model = written(family, tmp_path / "model", **values)
    core = engine(
        tmp_path / "model", num_blocks=num_blocks, max_num_batched_tokens=9, max_model_len=48
    )
    runner = core.executor.worker.runner
    layers = runner.layout.layers.values()
    assert current_platform().name == "toy_npu"
    assert {type(layer).__name__ for layer in layers} == {"ToyAttention"}
    assert all(isinstance(layer, Attention) for layer in layers)
    assert {tuple(cache.shape) for cache in runner.caches.values()} == {
        (num_blocks, 2, 2 * layer.head_size, 4) for layer in layers
    }
    pairs = [recorded(str(i), prompt, 16) for i, prompt in enumerate(prompts(1, 2, 3, 1, 19, 22))]
    serve(core, [request for request, _ in pairs])
    again = [recorded("again", pairs[-1][0].prompt)]
    serve(core, [request for request, _ in again])
    together, recorder = recorded("together", prompts(14)[0], temperature=1, seed=1, n=3)
    siblings = together.split()
    serve(core, siblings)
    assert any(request.num_preemptions for request, _ in pairs)
    assert again[0][0].num_cached == 20
    assert siblings[1].num_cached == 13
    for request, logits in (*pairs, *again, *((sibling, recorder) for sibling in siblings)):
        expect_right(model, request, logits)
