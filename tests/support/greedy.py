"""Greedy generation with a model alone, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from opgraft.ops.attention import AttentionBatch, attending
from opgraft.ops.attention.decoder import attention_layers

BLOCK = 16


@torch.inference_mode()
def greedy_tokens(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """The likeliest ``count`` tokens after a prompt, computed over a cache."""
    longest = len(prompt) + count
    blocks = -(-longest // BLOCK)
    layers = attention_layers(model)
    caches = {
        name: torch.zeros(layer.kv_cache_shape(blocks, BLOCK)) for name, layer in layers.items()
    }
    table, options = torch.arange(blocks)[None], {"block_size": BLOCK, "max_context_len": longest}
    done, new, tokens = 0, list(prompt), []
    for _ in range(count):
        batch = AttentionBatch.of_sequences([len(new)], [done + len(new)], table, caches, **options)
        with attending(batch):
            hidden = model(torch.tensor(new), torch.arange(done, done + len(new)))
        tokens.append(int(model.compute_logits(hidden[-1:]).argmax()))
        done, new = done + len(new), tokens[-1:]
    return tokens
