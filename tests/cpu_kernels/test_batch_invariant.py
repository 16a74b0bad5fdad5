"""Under ``model.batch_invariant`` a request has the same logits, bit for bit, alone and beside others."""

from __future__ import annotations

import dataclasses
from itertools import count
from pathlib import Path

import pytest
import torch
from opgraft.compat import packed_linear
from opgraft.config import CacheConfig
from opgraft.engine.core import EngineCore
from opgraft.engine.request import Request
from opgraft.engine.sampling_params import SamplingParams
from opgraft.errors import ConfigError
from support.engines import engine, prompts, recorded, serve, settings
from support.random_decoders import THROUGH_TRANSFORMERS, through_transformers, written

FAMILIES = {"Llama": {"tie_word_embeddings": True}, "Gemma3": {"sliding_window": 20}, "smollm3": {}}
SHAPE = {
    "hidden_size": 192,
    "intermediate_size": 1000,
    "vocab_size": 1000,
    "num_key_value_heads": 2,
}


def make(folder: Path, family: str) -> Path:
    if family in THROUGH_TRANSFORMERS:
        through_transformers(family, folder, **SHAPE, head_dim=48)
    else:
        written(family, folder, **SHAPE, head_dim=48, **FAMILIES[family])
    return folder


def invariant(folder: Path, dtype: str, num_blocks: int = 40, **scheduler: int) -> EngineCore:
    given = settings(folder, **scheduler)
    model = dataclasses.replace(given.model, dtype=dtype, batch_invariant=True)
    return EngineCore(
        dataclasses.replace(
            given, model=model, cache=CacheConfig(block_size=16, num_blocks=num_blocks)
        )
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_same_bits_beside_others(
    plugin: Path, tmp_path: Path, family: str, dtype: str
) -> None:
    """Alone or in a crowd, in chunks or whole, from a reused prefix, and computed anew: the logits do not differ."""
    unpackable = packed_linear.missing(getattr(torch, dtype))
    if unpackable:
        pytest.skip(unpackable)
    folder = make(tmp_path / "model", family)
    prompt = prompts(33)[0]
    first, alone = recorded("alone", prompt, 24)
    core = invariant(folder, dtype)
    serve(core, [first])
    again, reused = recorded("again", prompt, 24)
    serve(core, [again])
    pairs = [recorded(str(i), prompt, 24) for i in range(3)]
    others = [
        Request(f"other {i}", p, SamplingParams(max_tokens=20))
        for i, p in enumerate(prompts(1, 40, 9, 22))
    ]
    crowd = invariant(folder, dtype, max_num_batched_tokens=7)
    crowd.add([others[0], pairs[0][0], others[1], pairs[1][0], *others[2:], pairs[2][0]])
    for number in count():
        if not crowd.has_work:
            break
        crowd.step()
        if number % 9 == 0 and crowd.scheduler.running:
            crowd.scheduler._preempt(crowd.scheduler.running[-1])
    assert again.num_cached == 32
    assert any(request.num_preemptions for request, _ in pairs)
    for request, recorder in [(again, reused), *pairs]:
        assert request.output == first.output
        assert all(
            torch.equal(recorder.logits[key], logits) for key, logits in alone.logits.items()
        )


def test_layers_that_depend_on_their_neighbours_are_refused(tmp_path: Path) -> None:
    """Without kernels that compute each token alike, the setting is refused at start, with the layers."""
    folder = make(tmp_path / "model", "Llama")
    with pytest.raises(
        ConfigError, match=r"model\.batch_invariant is set.*layers\.0.*\(attention by Attention\)"
    ):
        invariant(folder, "float32")
    engine(folder)


def test_weights_that_cannot_be_packed_are_refused(plugin: Path, tmp_path: Path) -> None:
    """The refusal says why the weights cannot be packed, and in which dtype they could be."""
    folder = make(tmp_path / "model", "Llama")
    with pytest.raises(
        ConfigError,
        match=r"qkv_proj \(its weight cannot be packed: oneDNN packs no torch\.float16 here\).*in float32",
    ):
        invariant(folder, "float16")
