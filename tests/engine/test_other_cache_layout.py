"""A device's plugin replaces ``Attention`` with a cache in a layout of its own, and the engine runs on it."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Site
from engine.engines import engine, expect_right, prompts, recorded, serve
from opgraft import current_platform
from opgraft.ops.attention import Attention
from random_decoders import DECODERS, written

PLUGIN = '''
"""Attention of the toy NPU: tokens lie innermost, keys over values, heads outermost in a block.

A launch has room for as many tokens as the batch says that its longest sequence has.
"""

import opgraft
import torch
from opgraft.ops import Attention

platforms = ("toy_npu",)


class ToyAttention(Attention):
    def kv_cache_shape(self, num_blocks, block_size):
        return (num_blocks, self.num_kv_heads, 2 * self.head_size, block_size)

    def attend_batch(self, batch, pages, query, key, value):
        block, offset = pages.slots // batch.block_size, pages.slots % batch.block_size
        pages.cache[block, :, :, offset] = torch.cat((key, value), dim=-1)
        attended = torch.empty_like(query)
        room = torch.empty(2, self.num_kv_heads, self.head_size, batch.max_seq_len)
        bounds = batch.query_start_loc.tolist()
        for row, (length, start, end) in enumerate(zip(batch.seq_lens.tolist(), bounds, bounds[1:])):
            blocks = pages.block_table[row, : -(-length // batch.block_size)]
            tokens = pages.cache[blocks].permute(1, 2, 0, 3).flatten(2)[..., :length]
            seen = room[..., :length].copy_(torch.stack(tokens.chunk(2, dim=1)))
            attended[start:end] = self.attend_sequence(query[start:end][: batch.max_query_len], *seen)
        return attended

    def attend_sequence(self, query, keys, values):
        behind = torch.arange(keys.shape[-1] - len(query), keys.shape[-1])[:, None] - torch.arange(keys.shape[-1])
        seen = (behind >= 0) & (behind < (self.sliding_window or len(behind[0]) + 1))
        grouped = query.transpose(0, 1).unflatten(0, (self.num_kv_heads, -1))
        scores = (grouped @ keys[:, None] * self.scale).masked_fill(~seen, float("-inf"))
        values = values.masked_fill(~seen.any(0), 0.0)
        return (scores.softmax(-1) @ values.mT[:, None]).flatten(0, 1).transpose(0, 1)


@opgraft.hookimpl
def opgraft_register_ops():
    opgraft.CustomOp.register_oot(ToyAttention, name=Attention)
'''


@pytest.mark.parametrize(("name", "num_blocks"), [("llama", 12), ("gemma3", 24)])
def test_the_engine_runs_on_another_layout(
    toy_npu: Path, site: Site, tmp_path: Path, name: str, num_blocks: int
) -> None:
    """Chunks, reused prefixes, preemption and copies for siblings give transformers' tokens: no part looks inside."""
    site.plugin("toy-npu-attention", PLUGIN)
    family, values = DECODERS[name]
    model = written(family, tmp_path / "model", **values)
    core = engine(tmp_path / "model", num_blocks=num_blocks, max_num_batched_tokens=9, max_model_len=48)
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
