"""Rows of the ops' benchmark: attention over latents against attention over the keys and values that they stand for.

Sizes are those of DeepSeek-V2-Lite. Both sides are the layers as an engine calls them for one sequence that has one
token more. The latent side absorbs the key projection and applies that of values; the other one makes key and value of
its new token by the same projection, with heads of one size for both, as its kernel takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod

import torch
from opgraft.ops import Attention, ColumnParallelLinear, MLAAttention
from opgraft.ops.attention import AttentionBatch, attending
from opgraft.ops.attention.cached import CachedAttention
from timing import Row, ratio
from torch import Tensor
from torch.nn import functional

HEADS, NOPE, ROPE, VALUE, RANK = 16, 128, 64, 128, 512
EXPANDED = HEADS * (NOPE + ROPE + VALUE)
"""Elements of the keys and values of all heads."""
BLOCK = 32
CONTEXTS = (1024, 8192)
DTYPES = (torch.float32, torch.bfloat16)
BYTES_LIMIT = 0.12
TIME_LIMITS = {
    (1024, torch.float32): 1.0,
    (1024, torch.bfloat16): 1.0,
    (8192, torch.float32): 0.5,
    (8192, torch.bfloat16): 0.6,
}


def rows() -> Iterator[Row]:
    """Measure the bytes of a token in the cache, and the time of a decoded token, over those of expanded heads."""
    for dtype in DTYPES:
        with defaults(dtype):
            latent, expanded = layers()
        name = str(dtype).removeprefix("torch.")
        ours, theirs = prod(latent.kv_cache_shape(1, 1)) * dtype.itemsize, EXPANDED * dtype.itemsize
        detail = f"{ours} over {theirs} bytes a token"
        yield Row(f"latent cache {name} / expanded heads", ours / theirs, BYTES_LIMIT, detail)
        for context in CONTEXTS:
            subject, baseline = (
                decoding(latent, latent, context),
                decoding(latent, expanded, context),
            )
            label = f"latent attention of a token at {context} {name} / expanded heads"
            yield ratio(
                label, TIME_LIMITS.get((context, dtype)), subject, baseline, number=20, rounds=7
            )


@contextmanager
def defaults(dtype: torch.dtype) -> Iterator[None]:
    """Make layers of a dtype within the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def layers() -> tuple[MLAAttention, Attention]:
    """Make a layer of either kind."""
    proj = ColumnParallelLinear(RANK, HEADS * (NOPE + VALUE), bias=False, return_bias=False)
    proj.weight.normal_(std=RANK**-0.5)
    scale = (NOPE + ROPE) ** -0.5
    latent = MLAAttention(HEADS, scale, NOPE, ROPE, VALUE, None, RANK, proj, prefix="attn")
    return latent, Attention(HEADS, NOPE + ROPE, scale, prefix="attn")


def decoding(latent: MLAAttention, layer: CachedAttention, context: int) -> Callable[[], Tensor]:
    """Return the call of either layer for the last token of a text, whose others are in its cache."""
    dtype, blocks = latent.kv_b_proj.weight.dtype, context // BLOCK
    cache = torch.randn(layer.kv_cache_shape(blocks, BLOCK), dtype=dtype)
    table = torch.randperm(blocks, dtype=torch.int32)[None]
    batch = AttentionBatch.of_sequences([1], [context], table, {"attn": cache}, block_size=BLOCK)
    query, kv_c, k_pe = (
        torch.randn(1, *shape, dtype=dtype) for shape in ((HEADS, NOPE + ROPE), (RANK,), (ROPE,))
    )

    def call() -> Tensor:
        given = (kv_c, k_pe) if layer is latent else expand(latent, kv_c, k_pe)
        with attending(batch):
            attended: Tensor = layer(query, *given)
        return attended

    return call


def expand(latent: MLAAttention, kv_c: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
    """Make the keys and values of all heads, the latter with zeros behind them."""
    k_nope, value = latent.kv_b_proj(kv_c).view(1, HEADS, NOPE + VALUE).tensor_split([NOPE], dim=-1)
    key = torch.cat((k_nope, k_pe[:, None].expand(-1, HEADS, -1)), dim=-1)
    return key, functional.pad(value, (0, NOPE + ROPE - VALUE))
