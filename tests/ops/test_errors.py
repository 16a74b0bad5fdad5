"""Bad input: the error names the op, the argument, what it got and what it expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from opgraft import functional, ops


def t(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def rope() -> Any:
    return ops.RotaryEmbedding(4, 4, 8, 10000.0, True, torch.float32)


def encoder(**options: Any) -> Any:
    return ops.MMEncoderAttention(4, 6, num_kv_heads=2, **options)


def llama3(high_freq_factor: float) -> Any:
    return ops.Llama3RotaryEmbedding(
        4, 4, 8, 1e4, True, torch.float32, 8.0, 4.0, high_freq_factor, 8
    )


def mrope(section: list[int], interleaved: bool = False) -> Any:
    return ops.MRotaryEmbedding(4, 4, 8, 1e4, True, torch.float32, section, interleaved)


def chunked(chunk_size: int, local_size: int, rotary_dim: int = 4) -> Any:
    return ops.DualChunkRotaryEmbedding(
        4, rotary_dim, 32, 1e4, True, torch.float32, chunk_size, local_size
    )


POSITIONS = torch.arange(3)
CASES: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: ops.RMSNorm(4, var_hidden_size=5),
        "rms_norm: var_hidden_size is 5, expected 1 to hidden_size=4",
    ),
    (
        lambda: ops.RMSNorm(4)(t(2, 5)),
        r"rms_norm: x has shape \(2, 5\), expected a last dimension of 4",
    ),
    (lambda: ops.RMSNorm(4)(t()), r"rms_norm: x has shape \(\), expected a last dimension of 4"),
    (
        lambda: ops.RMSNorm(4)(t(2, 4), t(4)),
        r"rms_norm: residual has shape \(4,\), expected that of x, \(2, 4\)",
    ),
    (
        lambda: ops.GemmaRMSNorm(4)(t(5)),
        r"gemma_rms_norm: x has shape \(5,\), expected a last dimension of 4",
    ),
    (
        lambda: ops.GemmaRMSNorm(4)(t(1, 4), t(2, 4)),
        r"gemma_rms_norm: residual has shape \(2, 4\), expected that of x",
    ),
    (
        lambda: ops.SiluAndMul()(t(2, 5)),
        r"silu_and_mul: x has shape \(2, 5\), expected an even last dimension",
    ),
    (
        lambda: ops.SiluAndMul()(t()),
        r"silu_and_mul: x has shape \(\), expected an even last dimension",
    ),
    (
        lambda: ops.GeluAndMul()(t(3)),
        r"gelu_and_mul: x has shape \(3,\), expected an even last dimension",
    ),
    (
        lambda: ops.GeluAndMul("exact"),
        r"gelu_and_mul: approximate is 'exact', expected one of \('none', 'tanh'\)",
    ),
    (lambda: ops.GELU("erf"), r"gelu: approximate is 'erf', expected one of \('none', 'tanh'\)"),
    (
        lambda: ops.RotaryEmbedding(4, 3, 8, 1e4, True, torch.float32),
        "rotary_embedding: rotary_dim is 3, expected an even number from 2 to head_size=4",
    ),
    (
        lambda: ops.RotaryEmbedding(4, 6, 8, 1e4, True, torch.float32),
        "rotary_embedding: rotary_dim is 6, expected an even number from 2 to head_size=4",
    ),
    (
        lambda: rope()(POSITIONS, t(3, 6)),
        r"rotary_embedding: query has shape \(3, 6\), .* multiple of head_size=4",
    ),
    (
        lambda: rope()(POSITIONS, t(3, 4), t(3, 3)),
        r"rotary_embedding: key has shape \(3, 3\), .* multiple of head_size",
    ),
    (
        lambda: rope()(POSITIONS, t(4, 4)),
        r"rotary_embedding: query has shape \(4, 4\), expected it to begin with \(3,\)",
    ),
    (lambda: rope()(POSITIONS, t(4)), r"rotary_embedding: query has shape \(4,\), expected"),
    (
        lambda: rope()(-POSITIONS, t(3, 4)),
        "rotary_embedding: positions reach from -2 to 0, expected 0 to 7",
    ),
    (
        lambda: rope()(POSITIONS + 6, t(3, 4)),
        "rotary_embedding: positions reach from 6 to 8, expected 0 to 7",
    ),
    (
        lambda: rope()(POSITIONS.float(), t(3, 4)),
        "positions are torch.float32, expected torch.int32 or torch.int64",
    ),
    (
        lambda: rope()(POSITIONS, t(3, 4), t(3, 4).half()),
        "key is torch.float16, expected torch.float32 as query",
    ),
    (
        lambda: rope()(POSITIONS, t(3, 4), t(3, 4).to("meta")),
        "rotary_embedding: key is on meta, expected cpu as query",
    ),
    (
        lambda: rope()(POSITIONS, t(3, 4).to("meta")),
        "rotary_embedding: query is on meta, expected cpu as cos_sin_cache",
    ),
    (
        lambda: rope()(POSITIONS.to("meta"), t(3, 4)),
        "rotary_embedding: positions is on meta, expected cpu as cos_sin_cache",
    ),
    (
        lambda: rope()(torch.zeros(2, 3, dtype=torch.int64), t(2, 3)),
        r"query has shape \(2, 3\), expected it to begin",
    ),
    (
        lambda: functional.rotary_embedding(POSITIONS, t(3, 4), t(3, 4), 4, t(8, 6)),
        "rotary_embedding: cos_sin_cache has rotary_dim 6, expected at most head_size=4",
    ),
    (
        lambda: functional.rotary_embedding(POSITIONS, t(3, 4), t(3, 4), 4, t(8, 3)),
        r"rotary_embedding: cos_sin_cache has shape \(8, 3\), expected \[positions, rotary_dim\], the latter even",
    ),
    (
        lambda: llama3(4.0),
        "rotary_embedding: high_freq_factor is 4.0, expected more than low_freq_factor=4.0",
    ),
    (
        lambda: mrope([1, 1]),
        r"mrope: mrope_section is \[1, 1\], expected three counts with sum 2, half of rotary_dim=4",
    ),
    (
        lambda: mrope([1, 1, 1]),
        r"mrope: mrope_section is \[1, 1, 1\], expected three counts with sum 2",
    ),
    (lambda: mrope([3, -1, 0]), r"mrope: mrope_section is \[3, -1, 0\], expected three counts"),
    (
        lambda: mrope([0, 2, 0], True),
        r"mrope_section is \[0, 2, 0\], expected at most 1 pairs for height and 0 for width",
    ),
    (
        lambda: mrope([2, 0, 0])(POSITIONS.expand(2, 3), t(3, 4)),
        r"mrope: positions have shape \(2, 3\), expected \[3, ",
    ),
    (
        lambda: mrope([2, 0, 0])(POSITIONS.expand(3, 3) - 1, t(3, 4)),
        "mrope: positions reach from -1 to 1, expected",
    ),
    (
        lambda: chunked(8, 8),
        "dual_chunk_rotary_embedding: local_size is 8, expected 0 to below chunk_size=8",
    ),
    (
        lambda: chunked(8, 3)(POSITIONS + 30, t(3, 4), t(3, 4)),
        "positions reach from 30 to 32, expected 0 to 31",
    ),
    (
        lambda: chunked(8, 3)(POSITIONS, t(3, 5), t(3, 4)),
        r"dual_chunk_rotary_embedding: query has shape \(3, 5\)",
    ),
    (
        lambda: chunked(8, 3, 3),
        "dual_chunk_rotary_embedding: rotary_dim is 3, expected an even number from 2 to",
    ),
    (
        lambda: functional.dual_chunk_rotary_embedding(
            POSITIONS, t(3, 4), t(3, 4), 4, t(12, 4), 8, 3
        ),
        "dual_chunk_rotary_embedding: cos_sin_cache has 12 rows, expected at least 13 for chunk_size=8",
    ),
    (
        lambda: functional.dual_chunk_rotary_embedding(
            -POSITIONS, t(3, 4), t(3, 4), 4, t(13, 4), 8, 3
        ),
        "dual_chunk_rotary_embedding: positions reach from -2 to 0, expected 0",
    ),
    (
        lambda: ops.ApplyRotaryEmb()(t(4), t(1, 2), t(1, 2)),
        r"apply_rotary_emb: x has shape \(4,\), expected",
    ),
    (
        lambda: ops.ApplyRotaryEmb()(t(3, 1, 5), t(3, 2), t(3, 2)),
        r"apply_rotary_emb: x .* an even head_size",
    ),
    (
        lambda: ops.ApplyRotaryEmb()(t(3, 1, 4), t(3, 4), t(3, 2)),
        r"apply_rotary_emb: cos has shape \(3, 4\), expected \(3, 2\) for x of shape \(3, 1, 4\)",
    ),
    (
        lambda: ops.ApplyRotaryEmb()(t(3, 1, 4), t(3, 2), t(2, 2)),
        r"apply_rotary_emb: sin has shape \(2, 2\)",
    ),
    (
        lambda: ops.ApplyRotaryEmb()(t(3, 1, 4), t(3, 2).to("meta"), t(3, 2)),
        "apply_rotary_emb: cos is on meta, expected cpu as x",
    ),
    (
        lambda: ops.ScaledDotProductAttention()(t(1, 2, 3, 4), t(1, 2, 3, 4).half(), t(1, 2, 3, 4)),
        "scaled_dot_product_attention: key is torch.float16, expected torch.float32 as query",
    ),
    (
        lambda: ops.ScaledDotProductAttention()(
            t(1, 2, 3, 4), t(1, 2, 3, 4), t(1, 2, 3, 4).to("meta")
        ),
        "scaled_dot_product_attention: value is on meta, expected cpu as query",
    ),
    (
        lambda: ops.ScaledDotProductAttention()(t(1, 2, 3, 4), t(1, 2, 3, 5), t(1, 2, 3, 5)),
        "scaled_dot_product_attention: key has head size 5, expected 4 as query has",
    ),
    (
        lambda: ops.ScaledDotProductAttention()(
            t(1, 4, 3, 4), t(1, 3, 3, 4), t(1, 3, 3, 4), enable_gqa=True
        ),
        "scaled_dot_product_attention: key has 3 heads, expected a divisor of the 4 heads of query",
    ),
    (
        lambda: ops.MMEncoderAttention(4, 6, num_kv_heads=3),
        "mm_encoder_attn: num_kv_heads is 3, expected a divisor of 4",
    ),
    (
        lambda: ops.MMEncoderAttention(4, 6, num_kv_heads=0),
        "mm_encoder_attn: num_kv_heads is 0, expected a divisor of 4",
    ),
    (
        lambda: encoder()(t(1, 3, 25), t(1, 3, 12), t(1, 3, 12)),
        r"mm_encoder_attn: query has shape \(1, 3, 25\), expected \[batch, tokens, 24\] or \[batch, tokens, 4, 6\]",
    ),
    (
        lambda: encoder()(t(1, 3, 24), t(1, 3, 24), t(1, 3, 12)),
        r"mm_encoder_attn: key .* \[batch, tokens, 12\]",
    ),
    (
        lambda: encoder()(t(1, 3, 24), t(1, 3, 12), t(1, 2, 12)),
        "mm_encoder_attn: value has shape .* that of key",
    ),
    (
        lambda: encoder()(t(2, 3, 24), t(1, 3, 12), t(1, 3, 12)),
        "mm_encoder_attn: key .* expected the batch",
    ),
    (
        lambda: encoder()(t(1, 3, 24), t(1, 3, 12), t(1, 3, 12), torch.tensor([0, 2])),
        r"mm_encoder_attn: cu_seqlens is \[0, 2\], expected it to ascend from 0 to 3",
    ),
    (
        lambda: encoder()(t(1, 3, 24), t(1, 3, 12), t(1, 3, 12), torch.tensor([0, 4, 3])),
        r"cu_seqlens is \[0, 4, 3\]",
    ),
    (
        lambda: encoder()(
            t(1, 3, 24), t(1, 3, 12), t(1, 3, 12), sequence_lengths=torch.tensor([3, 3])
        ),
        r"mm_encoder_attn: sequence_lengths has shape \(2,\), expected \(1,\)",
    ),
    (
        lambda: encoder()(
            t(1, 3, 24), t(1, 3, 12), t(1, 3, 12), sequence_lengths=torch.tensor([4])
        ),
        "mm_encoder_attn: sequence_lengths reach from 4 to 4, expected 0 to 3",
    ),
    (
        lambda: encoder()(t(1, 3, 24), t(1, 3, 12), t(1, 3, 12), torch.tensor([[0, 3]])),
        r"mm_encoder_attn: cu_seqlens has shape \(1, 2\), expected one dimension",
    ),
    (
        lambda: encoder()(t(1, 3, 24), t(1, 3, 12), t(1, 3, 12), torch.tensor([1, 3])),
        r"mm_encoder_attn: cu_seqlens is \[1, 3\], expected it to ascend from 0 to 3",
    ),
    (
        lambda: encoder()(t(1, 3, 20), t(1, 3, 10), t(1, 3, 10)),
        r"mm_encoder_attn: query has shape \(1, 3, 20\), expected \[batch, tokens, 24\]",
    ),
    (
        lambda: encoder()(t(1, 3, 24), t(1, 3, 12), t(1, 3, 12).double()),
        "mm_encoder_attn: value is torch.float64",
    ),
]


@pytest.mark.parametrize(
    ("call", "message"), CASES, ids=[str(number) for number in range(len(CASES))]
)
def test_error(call: Callable[[], Any], message: str) -> None:
    """A ``ValueError`` says which op and argument, what it got and what it expected."""
    with pytest.raises(ValueError, match=message):
        call()
