"""Caches of 8 bits: what the engine computes over them, how much they hold, and who cannot have one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Site
from opgraft.config import CacheConfig
from opgraft.engine.core import EngineCore
from opgraft.engine.runner.cache_layout import CacheLayout
from opgraft.errors import ConfigError
from opgraft.ops.attention import Attention
from support.engines import engine, plain_logits, prompts, recorded, serve, settings
from support.random_decoders import DECODERS, written

ERRORS = {"int8": 0.02, "fp8": 0.1}
"""Bounds on the error of logits, in standard deviations of logits."""

codes = pytest.mark.parametrize("dtype", ERRORS)
families = pytest.mark.parametrize(
    "checkpoint", [pytest.param("llama", marks=pytest.mark.slow), "gemma3"], indirect=True
)


@pytest.fixture(scope="module")
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    """A folder with a family's random weights, and transformers' model of them."""
    family, values = DECODERS[request.param]
    if request.param == "gemma3":  # a layer of each kind
        kinds = ["sliding_attention", "full_attention"]
        values = {**values, "num_hidden_layers": 2, "layer_types": kinds}
    folder = tmp_path_factory.mktemp("cache dtypes") / request.param
    return folder, written(family, folder, **values)


def engine_of(folder: Path, dtype: str, **given: Any) -> EngineCore:
    config = settings(folder, **given)
    return EngineCore(
        dataclasses.replace(config, cache=dataclasses.replace(config.cache, dtype=dtype))
    )


@families
@codes
def test_however_tokens_come_to_be_computed(checkpoint: tuple[Path, Any], dtype: str) -> None:
    """In chunks, after preemption, from a reused prefix and as siblings, logits are the same, near transformers'."""
    folder, model = checkpoint
    limits = {"max_model_len": 48, "max_num_batched_tokens": 9, "max_num_seqs": 8}
    core = engine_of(
        folder, dtype, num_blocks=engine(folder, **limits).cache.most_blocks(48, 9), **limits
    )
    pairs = [
        recorded(str(i), prompt, 16)
        for i, prompt in enumerate(prompts(1, 2, 3, 1, 2, 1, 19, 30, 11, 25))
    ]
    serve(core, [request for request, _ in pairs])
    assert any(request.num_preemptions for request, _ in pairs)
    again, again_logits = recorded("again", pairs[-1][0].prompt, 16)
    serve(core, [again])
    assert again.num_cached
    together, siblings_logits = recorded(
        "together", pairs[7][0].prompt, 16, temperature=1, seed=5, n=3
    )
    siblings = together.split()
    serve(core, siblings)
    alone = engine_of(folder, dtype, max_num_seqs=1)
    for request, recorder in (
        *pairs,
        (again, again_logits),
        *((each, siblings_logits) for each in siblings),
    ):
        expected = plain_logits(model, request.prompt, request.output)
        found = torch.stack([recorder.logits[tuple(request.output[:i])] for i in range(16)])
        assert ((found - expected).square().mean().sqrt() / expected.std()) < ERRORS[dtype]
        if request.params.greedy:
            single, single_logits = recorded("single", request.prompt, 16)
            serve(alone, [single])
            assert single.output == request.output
            same = torch.stack([single_logits.logits[tuple(request.output[:i])] for i in range(16)])
            torch.testing.assert_close(found, same, rtol=0, atol=1e-4)


@codes
def test_what_a_cache_holds(dtype: str) -> None:
    """Of the same memory, codes hold nearly twice the tokens of bfloat16: a row of 64 has four bytes more."""
    layers = {"attn": Attention(6, 64, 0.125, 2, prefix="attn")}
    plain = CacheLayout.of(layers, 16, torch.bfloat16).bytes_per_block
    held = {"int8": torch.int8, "fp8": torch.uint8}[dtype]
    assert plain / CacheLayout.of(layers, 16, held).bytes_per_block == 128 / 68


@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
@codes
def test_the_engine_says_what_its_cache_holds(checkpoint: tuple[Path, Any], dtype: str) -> None:
    """With the same bytes the capacity grows by the bytes that a token takes less, and the engine says so."""
    given = settings(checkpoint[0], max_model_len=48)
    cache = dataclasses.replace(given.cache, num_blocks=None, memory_bytes=1 << 20)
    held = {}
    for name in ("auto", dtype):
        core = EngineCore(dataclasses.replace(given, cache=dataclasses.replace(cache, dtype=name)))
        held[name] = core.cache_tokens
        assert f"the cache holds {held[name]:,} tokens" in core.capacity()
    size = next(iter(core.executor.worker.runner.layout.layers.values())).head_size
    assert held[dtype] == pytest.approx(held["auto"] * 4 * size / (size + 4), rel=0.01)


@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
def test_another_dtype_than_the_models(checkpoint: tuple[Path, Any]) -> None:
    """A floating-point cache is of the model's dtype, which is said before a request fails."""
    with pytest.raises(
        ConfigError, match=r"cache\.dtype is bfloat16, and the model computes in float32"
    ):
        engine_of(checkpoint[0], "bfloat16")


PLUGIN = """
import opgraft
from opgraft.ops import Attention

platforms = ("cpu", "simulated")


class Unquantized(Attention):
    def kv_cache_shape(self, num_blocks, block_size):
        return (num_blocks, self.num_kv_heads, 2 * self.head_size, block_size)


@opgraft.hookimpl
def opgraft_register_ops():
    opgraft.CustomOp.register_oot(Unquantized, name=Attention)
"""


@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
@codes
def test_a_layout_without_a_place_for_codes(
    checkpoint: tuple[Path, Any], dtype: str, site: Site
) -> None:
    """A replaced layer whose own layout knows of no codes is named, with what to set instead."""
    site.plugin("unquantized", PLUGIN)
    with pytest.raises(
        ConfigError,
        match=r"layer '.*attn' keeps its cache in a layout of Unquantized.*cache\.dtype",
    ):
        engine_of(checkpoint[0], dtype)


@pytest.mark.parametrize("checkpoint", ["deepseek v2"], indirect=True)
def test_latents_have_no_codes(checkpoint: tuple[Path, Any]) -> None:
    """A cache of latents is in the model's dtype, and the error tells the setting for that."""
    with pytest.raises(ConfigError, match=r"layout of MLAAttention.*set cache\.dtype to auto"):
        engine_of(checkpoint[0], "int8")


@pytest.mark.parametrize(
    ("dtype", "reason"), [("fp8_e5m2", "e4m3 is more precise"), ("fp8_e4m3", "which is e4m3")]
)
def test_names_of_other_engines(dtype: str, reason: str) -> None:
    """A dtype that other engines have is refused with what to set instead, and why."""
    with pytest.raises(ConfigError, match=rf"cache\.dtype is '{dtype}': use fp8, .*{reason}"):
        CacheConfig(dtype=dtype)
    with pytest.raises(ConfigError, match=r"cache\.dtype is 'fp4': use one of auto, .*, fp8, int8"):
        CacheConfig(dtype="fp4")
