"""Bad input: the error names the op, the argument, what it got and what it expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from opgraft import ops


def t(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def rope() -> Any:
    return ops.RotaryEmbedding(4, 4, 8, 10000.0, True, torch.float32)


def encoder(**options: Any) -> Any:
    return ops.MMEncoderAttention(4, 6, num_kv_heads=2, **options)


POSITIONS = torch.arange(3)
CASES: list[tuple[Callable[[], Any], str]] = [
    (lambda: ops.RMSNorm(4, var_hidden_size=5), "rms_norm: var_hidden_size is 5, expected 1 to hidden_size=4"),
    (lambda: ops.RMSNorm(4)(t(2, 5)), r"rms_norm: x has shape \(2, 5\), expected a last dimension of 4"),
    (lambda: ops.RMSNorm(4)(t()), r"rms_norm: x has shape \(\), expected a last dimension of 4"),
    (lambda: ops.RMSNorm(4)(t(2, 4), t(4)), r"rms_norm: residual has shape \(4,\), expected that of x, \(2, 4\)"),
    (lambda: ops.GemmaRMSNorm(4)(t(5)), r"gemma_rms_norm: x has shape \(5,\), expected a last dimension of 4"),
    (lambda: ops.GemmaRMSNorm(4)(t(1, 4), t(2, 4)), r"gemma_rms_norm: residual has shape \(2, 4\), expected that of x"),
    (lambda: ops.SiluAndMul()(t(2, 5)), r"silu_and_mul: x has shape \(2, 5\), expected an even last dimension"),
    (lambda: ops.SiluAndMul()(t()), r"silu_and_mul: x has shape \(\), expected an even last dimension"),
    (lambda: ops.GeluAndMul()(t(3)), r"gelu_and_mul: x has shape \(3,\), expected an even last dimension"),
    (lambda: ops.GeluAndMul("exact"), r"gelu_and_mul: approximate is 'exact', expected one of \('none', 'tanh'\)"),
    (lambda: ops.GELU("erf"), r"gelu: approximate is 'erf', expected one of \('none', 'tanh'\)"),
    (
        lambda: ops.RotaryEmbedding(4, 3, 8, 1e4, True, torch.float32),
        "rotary_embedding: rotary_dim is 3, expected an even number from 2 to head_size=4",
    ),
    (
        lambda: ops.RotaryEmbedding(4, 6, 8, 1e4, True, torch.float32),
        "rotary_embedding: rotary_dim is 6, expected an even number from 2 to head_size=4",
    ),
    (lambda: rope()(POSITIONS, t(3, 6)), r"rotary_embedding: query has shape \(3, 6\), .* multiple of head_size=4"),
    (
        lambda: rope()(POSITIONS, t(3, 4), t(3, 3)),
        r"rotary_embedding: key has shape \(3, 3\), .* multiple of head_size",
    ),
    (
        lambda: rope()(POSITIONS, t(4, 4)),
        r"rotary_embedding: query has shape \(4, 4\), expected it to begin with \(3,\)",
    ),
    (lambda: rope()(POSITIONS, t(4)), r"rotary_embedding: query has shape \(4,\), expected"),
    (lambda: ops.ApplyRotaryEmb()(t(4), t(1, 2), t(1, 2)), r"apply_rotary_emb: x has shape \(4,\), expected"),
    (lambda: ops.ApplyRotaryEmb()(t(3, 1, 5), t(3, 2), t(3, 2)), r"apply_rotary_emb: x .* an even head_size"),
    (
        lambda: ops.ApplyRotaryEmb()(t(3, 1, 4), t(3, 4), t(3, 2)),
        r"apply_rotary_emb: cos has shape \(3, 4\), expected \(3, 2\) for x of shape \(3, 1, 4\)",
    ),
    (lambda: ops.ApplyRotaryEmb()(t(3, 1, 4), t(3, 2), t(2, 2)), r"apply_rotary_emb: sin has shape \(2, 2\)"),
    (
        lambda: ops.ScaledDotProductAttention()(t(1, 2, 3, 4), t(1, 2, 3, 5), t(1, 2, 3, 5)),
        "scaled_dot_product_attention: key has head size 5, expected 4 as query has",
    ),
    (
        lambda: ops.ScaledDotProductAttention()(t(1, 4, 3, 4), t(1, 3, 3, 4), t(1, 3, 3, 4), enable_gqa=True),
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
    (lambda: encoder()(t(1, 3, 24), t(1, 3, 24), t(1, 3, 12)), r"mm_encoder_attn: key .* \[batch, tokens, 12\]"),
    (lambda: encoder()(t(1, 3, 24), t(1, 3, 12), t(1, 2, 12)), "mm_encoder_attn: value has shape .* that of key"),
    (lambda: encoder()(t(2, 3, 24), t(1, 3, 12), t(1, 3, 12)), "mm_encoder_attn: key .* expected the batch"),
    (
        lambda: encoder()(t(1, 3, 24), t(1, 3, 12), t(1, 3, 12), torch.tensor([0, 2])),
        r"mm_encoder_attn: cu_seqlens is \[0, 2\], expected it to ascend from 0 to 3",
    ),
    (lambda: encoder()(t(1, 3, 24), t(1, 3, 12), t(1, 3, 12), torch.tensor([0, 4, 3])), r"cu_seqlens is \[0, 4, 3\]"),
    (
        lambda: encoder()(t(1, 3, 24), t(1, 3, 12), t(1, 3, 12), sequence_lengths=torch.tensor([3, 3])),
        r"mm_encoder_attn: sequence_lengths has shape \(2,\), expected \(1,\)",
    ),
]


@pytest.mark.parametrize(("call", "message"), CASES, ids=[str(number) for number in range(len(CASES))])
def test_error(call: Callable[[], Any], message: str) -> None:
    """A ``ValueError`` says which op and argument, what it got and what it expected."""
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("op", "x", "message"),
    [
        (ops.LayerNorm([2, 4]), t(4, 2), r"expected input with shape \[\*, 2, 4\]"),
        (ops.LayerNorm([2, 4]), t(4), r"expected input with shape \[\*, 2, 4\]"),
        (ops.Linear(4, 2), t(3, 5), r"cannot be multiplied \(3x5 and 4x2\)"),
    ],
)
def test_drop_ins_raise_torchs_errors(op: Any, x: torch.Tensor, message: str) -> None:
    """Ops that stand in for a module of torch leave the checks to torch's function, whose error names both shapes."""
    with pytest.raises(RuntimeError, match=message):
        op(x)
