"""Plugins of others replace latent attention: as a whole, its layer with the cache, and its form."""

from __future__ import annotations

from pathlib import Path

import opgraft
import pytest
from conftest import Site
from opgraft import current_platform
from support.engines import engine, expect_right, prompts, recorded, serve
from support.random_decoders import DECODERS, written

HEAD = """
import opgraft
import torch
from opgraft import ops

platforms = ("toy_npu",)
"""
FORM = """
class FastAttention(ops.MLAPagedAttention):
    def forward_oot(self, query, cache, block_table, query_start_loc, seq_lens):
        attended, bounds = query.new_empty(*query.shape[:2], self.kv_lora_rank), query_start_loc.tolist()
        for row, (length, start, end) in enumerate(zip(seq_lens.tolist(), bounds, bounds[1:])):
            seen = cache[block_table[row].clamp(0, len(cache) - 1)].flatten(0, 1)
            for token in range(start, end):
                rows = seen[: length - (end - 1 - token)]
                shares = torch.softmax(query[token] @ rows.T * self.scale, -1)
                attended[token] = shares @ rows[:, : self.kv_lora_rank]
        return attended
"""
LAYER = '''
class FastAttention(ops.MLAAttention):
    """Latents by elements, and tokens innermost."""

    def kv_cache_shape(self, num_blocks, block_size):
        return (num_blocks, self.head_size, block_size)

    def attend_batch(self, batch, pages, query, kv_c, k_pe):
        block, offset = pages.slots // batch.block_size, pages.slots % batch.block_size
        pages.cache[block, :, offset] = torch.cat((kv_c, k_pe), -1)
        bounds, parts = batch.query_start_loc.tolist(), []
        for row, (length, start, end) in enumerate(zip(batch.seq_lens.tolist(), bounds, bounds[1:])):
            blocks = pages.block_table[row, : -(-length // batch.block_size)]
            rows = pages.cache[blocks].transpose(0, 1).flatten(1)[:, :length].T
            parts.append(self._expanded(query[start:end], *rows.split([self.kv_lora_rank, self.qk_rope_head_dim], -1)))
        return torch.cat(parts)
'''
WHOLE = """
class FastAttention(ops.MultiHeadLatentAttentionWrapper):
    def forward(self, positions, hidden_states, llama_4_scaling=None):
        return super().forward(positions, hidden_states, llama_4_scaling)
"""
PLUGINS = {
    "MLAPagedAttention": FORM,
    "MLAAttention": LAYER,
    "MultiHeadLatentAttentionWrapper": WHOLE,
}


@pytest.mark.parametrize("target", PLUGINS)
def test_a_plugin_replaces_it(target: str, toy_npu: Path, site: Site, tmp_path: Path) -> None:
    """The engine runs on the replacement, in chunks and after preemption, and gives transformers' tokens."""
    hook = f"""

@opgraft.hookimpl
def opgraft_register_ops():
    opgraft.CustomOp.register_oot(FastAttention, name=ops.{target})
"""
    name = f"toy-npu-{target.lower()}"
    site.plugin(name, HEAD + PLUGINS[target] + hook)
    family, values = DECODERS["deepseek v3, with latent queries and yarn"]
    model = written(family, tmp_path / "model", **values)
    core = engine(tmp_path / "model", num_blocks=12, max_num_batched_tokens=9, max_model_len=48)
    assert current_platform().name == "toy_npu"
    pairs = [recorded(str(i), prompt, 16) for i, prompt in enumerate(prompts(1, 3, 19, 22))]
    serve(core, [request for request, _ in pairs])
    assert any(request.num_preemptions for request, _ in pairs)
    rows = [
        row
        for row in opgraft.explain(core.executor.worker.runner.model).rows
        if row.op_class == "FastAttention"
    ]
    assert len(rows) == 3
    for request, logits in pairs:
        expect_right(model, request, logits)
