"""Bad input that torch would broadcast, compute with, or refuse in words of its own; and what autocast lets pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from opgraft import functional, ops
from torch import nn
from torch.nn import functional as F


def t(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


HALF, WHOLE, NAN = torch.float16, torch.int64, float("nan")
linear, layer_norm, rms_norm = functional.linear, functional.layer_norm, functional.rms_norm
attend = functional.scaled_dot_product_attention


def encode(*tensors: torch.Tensor, heads: int = 2, **others: Any) -> torch.Tensor:
    return functional.mm_encoder_attn(*tensors, heads, 1, 1.0, **others)


def rotary(positions: int = 8, base: float = 1e4, dtype: torch.dtype = torch.float32) -> nn.Module:
    return ops.RotaryEmbedding(4, 4, positions, base, True, dtype)


def rotate(head_size: int) -> Any:
    return functional.rotary_embedding(t(3, dtype=WHOLE), t(3, 8), t(3, 8), head_size, t(5, 4))


def experts(**others: Any) -> Any:
    given = {"x": t(3, 4), "w13": t(5, 4, 4), "w2": t(5, 4, 2), "topk_weights": t(3, 2)}
    return functional.fused_experts(**{**given, "topk_ids": t(3, 2, dtype=WHOLE), **others})


ACTIVATIONS = [
    "silu_and_mul",
    "mul_and_silu",
    "gelu_and_mul",
    "fatrelu_and_mul",
    "swigluoai_and_mul",
    "swiglustep_and_mul",
]
ACTIVATIONS += [
    "gelu",
    "gelu_tanh",
    "gelu_new",
    "gelu_fast",
    "quick_gelu",
    "relu2",
    "silu",
    "silu_",
]
QKV = (t(1, 3, 8), t(1, 3, 4), t(1, 3, 4))
HEADS = t(1, 4, 3, 8)
CASES: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: linear(t(3, 5), t(2, 4)),
        r"linear: x has shape \(3, 5\), expected a last dimension of 4",
    ),
    (lambda: linear(t(), t(2, 4)), r"linear: x has shape \(\), expected a last dimension of 4"),
    (
        lambda: linear(t(3, 4), t(4)),
        r"linear: weight has shape \(4,\), expected \[out_features, in_features\]",
    ),
    (
        lambda: linear(t(3, 4), t(2, 4, dtype=HALF)),
        "linear: weight is torch.float16, expected torch.float32 as x",
    ),
    (
        lambda: linear(t(3, 4), t(2, 4, device="meta")),
        "linear: weight is on meta, expected cpu as x",
    ),
    (
        lambda: linear(t(3, 4, dtype=WHOLE), t(2, 4, dtype=WHOLE)),
        r"linear: x is torch.int64, expected one of \(torch",
    ),
    (lambda: linear(t(3, 4), t(2, 4), t(1)), r"linear: bias has shape \(1,\), expected \(2,\)"),
    (
        lambda: linear(t(3, 4), t(2, 4), t(3, 2)),
        r"linear: bias has shape \(3, 2\), expected \(2,\)",
    ),
    (
        lambda: linear(t(3, 4), t(2, 4), t(2, dtype=HALF)),
        "linear: bias is torch.float16, expected torch.float32 as x",
    ),
    (
        lambda: linear(t(3, 4), t(2, 4), t(2, device="meta")),
        "linear: bias is on meta, expected cpu as x",
    ),
    (
        lambda: linear(t(3, 4), t(2, 4), residual=t(2)),
        r"linear: residual has shape \(2,\), expected that of the",
    ),
    (
        lambda: linear(t(3, 4), t(2, 4), residual=t(3, 2, dtype=torch.float64)),
        "linear: residual is torch.float64, expected torch.float32 as the result",
    ),
    (
        lambda: linear(t(3, 4), t(2, 4), residual=t(3, 2, device="meta")),
        "linear: residual is on meta, expected cpu",
    ),
    (
        lambda: ops.SiluAndMulWithClamp(-1.0),
        "silu_and_mul_with_clamp: swiglu_limit is -1.0, expected a number that is",
    ),
    (
        lambda: ops.SwigluOAIAndMul(limit=NAN),
        "swigluoai_and_mul: limit is nan, expected a number that is not negative",
    ),
    (
        lambda: ops.SwigluStepAndMul(-1.0),
        "swiglustep_and_mul: limit is -1.0, expected a number that is not negative",
    ),
    (
        lambda: functional.silu_and_mul_with_clamp(t(4), NAN),
        "silu_and_mul_with_clamp: limit is nan, expected a number",
    ),
    (
        lambda: functional.swigluoai_and_mul(t(4), limit=-1.0),
        "swigluoai_and_mul: limit is -1.0, expected a number",
    ),
    (
        lambda: functional.swiglustep_and_mul(t(4), -1.0),
        "swiglustep_and_mul: limit is -1.0, expected a number",
    ),
    (
        lambda: ops.RMSNorm((64,)),
        r"rms_norm: hidden_size is \(64,\), expected a whole number that is not negative",
    ),  # type: ignore[arg-type]
    (
        lambda: ops.GemmaRMSNorm(-1),
        "gemma_rms_norm: hidden_size is -1, expected a whole number that is not negative",
    ),
    (
        lambda: ops.RMSNorm(4, eps=-1.0),
        "rms_norm: eps is -1.0, expected a number that is not negative",
    ),
    (
        lambda: rotary(positions=0),
        "rotary_embedding: max_position_embeddings is 0, expected a positive number",
    ),
    (lambda: rotary(base=0.0), "rotary_embedding: base is 0.0, expected a positive number"),
    (
        lambda: rotary(dtype=WHOLE),
        r"rotary_embedding: dtype is torch.int64, expected one of \(torch",
    ),
    (lambda: rotate(0), "rotary_embedding: head_size is 0, expected a positive number"),
    (
        lambda: torch.ops.opgraft.rms_norm(t(3, 4), t(4, device="meta")),
        "rms_norm: the tensors are on cpu, meta, expected one device",
    ),
    (
        lambda: functional.quant_fp8_static(t(3, 4), t(2), (1, -1)),
        r"quant_fp8_static: scale has shape \(2,\), expected \(3, 1\)$",
    ),
    (
        lambda: functional.mm_encoder_attn(t(3, 8), t(3, 8), t(3, 8), 2, 2, 1.0),
        r"query has shape \(3, 8\), expected \[batch, tokens, 2 · head_size\] or",
    ),
    (
        lambda: ops.Linear(4, 2)(t(3, 5)),
        r"linear: x has shape \(3, 5\), expected a last dimension of 4",
    ),
    (
        lambda: ops.LayerNorm([2, 4])(t(4, 2)),
        r"layer_norm: x has shape \(4, 2\), expected it to end in \(2, 4\)",
    ),
    (
        lambda: ops.LayerNorm([2, 4])(t(4)),
        r"layer_norm: x has shape \(4,\), expected it to end in \(2, 4\)",
    ),
    (
        lambda: layer_norm(t(3, 4), ()),
        r"layer_norm: x has shape \(3, 4\), expected it to end in \(\)",
    ),
    (lambda: layer_norm(t(4, dtype=WHOLE), (4,)), "layer_norm: x is torch.int64, expected one of"),
    (
        lambda: layer_norm(t(3, 4), (4,), t(1)),
        r"layer_norm: weight has shape \(1,\), expected \(4,\)",
    ),
    (
        lambda: layer_norm(t(3, 4), (4,), t(4), t(3)),
        r"layer_norm: bias has shape \(3,\), expected \(4,\)",
    ),
    (
        lambda: layer_norm(t(4), (4,), t(4, dtype=HALF)),
        "layer_norm: weight is torch.float16, expected torch.float32",
    ),
    (
        lambda: layer_norm(t(4).double(), (4,), t(4)),
        "layer_norm: weight is torch.float32, expected torch.float64",
    ),
    (
        lambda: layer_norm(t(4), (4,), t(4), t(4, device="meta")),
        "layer_norm: bias is on meta, expected cpu as x",
    ),
    (lambda: rms_norm(t(3, 4), variance_size=0), "rms_norm: variance_size is 0, expected 1 to 4"),
    (lambda: rms_norm(t(3, 4), variance_size=5), "rms_norm: variance_size is 5, expected 1 to 4"),
    (
        lambda: functional.fused_add_rms_norm(t(3, 4), t(3, 4), variance_size=-1),
        "fused_add_rms_norm: variance_size is -1, expected 1 to 4",
    ),
    (lambda: rms_norm(t()), r"rms_norm: x has shape \(\), expected at least one dimension"),
    (lambda: rms_norm(t(4, dtype=WHOLE)), "rms_norm: x is torch.int64, expected one of"),
    (lambda: rms_norm(t(4), t(4, dtype=WHOLE)), "rms_norm: weight is torch.int64, expected one of"),
    (
        lambda: functional.gemma_rms_norm(t(4, dtype=WHOLE), t(4)),
        "gemma_rms_norm: x is torch.int64, expected one of",
    ),
    (
        lambda: functional.rms_norm_gated(t(4, dtype=WHOLE), t(4)),
        "rms_norm_gated: x is torch.int64, expected one of",
    ),
    (
        lambda: functional.fused_add_rms_norm(t(4), t(4, dtype=HALF)),
        "fused_add_rms_norm: residual is torch.float16, expected torch.float32 as x",
    ),
    (
        lambda: functional.xielu(t(4), t(2), t(1)),
        r"xielu: alpha_p has shape \(2,\), expected one element",
    ),
    (
        lambda: functional.xielu(t(4), t(1), t(0)),
        r"xielu: alpha_n has shape \(0,\), expected one element",
    ),
    (
        lambda: functional.xielu(t(4), t(1), t(1, device="meta")),
        "xielu: alpha_n is on meta, expected cpu as x",
    ),
    (lambda: encode(*QKV, heads=0), "mm_encoder_attn: num_heads is 0, expected a positive number"),
    (
        lambda: ops.MMEncoderAttention(0, 4),
        "mm_encoder_attn: num_heads is 0, expected a positive number",
    ),
    (
        lambda: ops.MMEncoderAttention(2, 0),
        "mm_encoder_attn: head_size is 0, expected a positive number",
    ),
    (
        lambda: encode(t(), t(), t()),
        r"mm_encoder_attn: query has shape \(\), expected \[batch, tokens",
    ),
    (
        lambda: encode(*QKV, cu_seqlens=torch.tensor([0.0, 3.0])),
        "mm_encoder_attn: cu_seqlens are torch.float32, expec",
    ),
    (
        lambda: encode(*QKV, sequence_lengths=t(1)),
        "mm_encoder_attn: sequence_lengths are torch.float32, expected",
    ),
    (
        lambda: attend(HEADS, HEADS, HEADS, t(3, 3, dtype=WHOLE)),
        "attn_mask is torch.int64, expected one of",
    ),
    (
        lambda: attend(HEADS, HEADS, HEADS, t(3, 3, dtype=HALF)),
        "attn_mask is torch.float16, expected torch.float32 as",
    ),
    (
        lambda: attend(HEADS, HEADS, HEADS, t(3, 3, device="meta")),
        "attn_mask is on meta, expected cpu as query",
    ),
    (
        lambda: attend(HEADS, HEADS, HEADS, t(2, 3)),
        r"attn_mask has shape \(2, 3\), expected it to broadcast to \(1, 4",
    ),
    (
        lambda: attend(t(3, 8), t(3, 8), t(3, 8), enable_gqa=True),
        r"query has shape \(3, 8\), expected \[..., heads",
    ),
    (
        lambda: attend(t(8), t(8), t(8)),
        r"query has shape \(8,\), expected \[..., tokens, head_size\]",
    ),
    (
        lambda: attend(HEADS, HEADS, t(1, 4, 2, 8)),
        "scaled_dot_product_attention: value has 2 tokens, expected 3 as",
    ),
    (
        lambda: attend(HEADS, HEADS, t(1, 2, 3, 8), enable_gqa=True),
        "value has 2 heads, expected 4 as key has",
    ),
    (
        lambda: attend(HEADS, t(1, 3, 3, 8), HEADS),
        r"key has shape \(1, 3, 3, 8\), expected it to fit \(1, 4, 3, 8\)",
    ),
    (
        lambda: attend(*(HEADS.long(),) * 3),
        "scaled_dot_product_attention: query is torch.int64, expected one of",
    ),
    (
        lambda: functional.conv2d(*(t(1, 1, 2, 2, dtype=WHOLE),) * 2),
        "conv2d: x is torch.int64, expected one of",
    ),
    (
        lambda: functional.apply_rotary_emb(t(3, 1, 4, dtype=WHOLE), t(3, 2), t(3, 2)),
        "apply_rotary_emb: x is torch.int64, expected one of",
    ),
    (
        lambda: functional.rotary_embedding(
            torch.arange(3), *(t(3, 4, dtype=WHOLE),) * 2, 4, t(8, 4)
        ),
        "rotary_embedding: query is torch.int64, expected one of",
    ),
    (
        lambda: functional.grouped_topk(
            t(2, 4), 1, True, 0, 0, e_score_correction_bias=t(4, dtype=WHOLE)
        ),
        "grouped_topk: e_score_correction_bias is torch.int64, expected one of",
    ),
    (lambda: experts(activation="relu"), "fused_experts: activation is 'relu', expected one of"),
    (
        lambda: experts(x=t(3, 1, 4)),
        r"fused_experts: x has shape \(3, 1, 4\), expected 2 dimensions",
    ),
    (
        lambda: experts(w13=t(5, 4, 3)),
        r"fused_experts: w13 has shape \(5, 4, 3\), expected \(5, 4, 4\)",
    ),
    (
        lambda: experts(w2=t(4, 4, 2)),
        r"fused_experts: w2 has shape \(4, 4, 2\), expected \(5, 4, 2\)",
    ),
    (
        lambda: experts(w2=t(5, 4, 2, dtype=HALF)),
        "fused_experts: w2 is torch.float16, expected torch.float32 as x",
    ),
    (
        lambda: experts(topk_weights=t(3, 1)),
        r"fused_experts: topk_weights has shape \(3, 1\), expected \(3, 2\)",
    ),
    (
        lambda: experts(topk_ids=t(3, 2)),
        "fused_experts: topk_ids are torch.float32, expected torch.int32 or",
    ),
    (
        lambda: experts(w2_bias=t(5, 2)),
        r"fused_experts: w2_bias has shape \(5, 2\), expected \(5, 4\)",
    ),
    (
        lambda: experts(topk_ids=t(3, 2, dtype=WHOLE) + 5),
        "fused_experts: topk_ids reach from 5 to 5, expected those of 5 experts, 0 to 4, or -1 for none",
    ),
]


@pytest.mark.parametrize(
    ("call", "message"), CASES, ids=[str(number) for number in range(len(CASES))]
)
def test_error(call: Callable[[], Any], message: str) -> None:
    """A ``ValueError`` says which op and argument, what it got and what it expected."""
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e5m2], ids=str
)
def test_activations_take_floating_point(name: str, dtype: torch.dtype) -> None:
    """Activations refuse what is no floating-point number that they compute with, by name."""
    with pytest.raises(ValueError, match=f"^{name}: x is {dtype}, expected one of"):
        getattr(functional, name)(t(2, 4, dtype=dtype))


def test_a_linear_that_is_known() -> None:
    """A layer whose weight has been met before, for which a kernel may have a shorter way, still says what is wrong."""
    op = ops.Linear(4, 2)
    for _ in range(3):
        op(t(3, 4))
        with pytest.raises(
            ValueError, match=r"linear: x has shape \(3, 5\), expected a last dimension of 4"
        ):
            op(t(3, 5))


def test_convolution_under_autocast() -> None:
    """Under autocast a convolution takes an input of another dtype, as torch's does, and computes the same."""
    x = torch.randn(2, 3, 9, 9).bfloat16()
    for stride in (1, 2):
        module, op = nn.Conv2d(3, 5, 3, stride), ops.Conv2dLayer(3, 5, 3, stride)
        op.load_state_dict(module.state_dict())
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(op(x), module(x))
        with pytest.raises(
            ValueError, match=r"weight is torch\.float32, expected torch\.bfloat16 as x"
        ):
            op(x)


def test_linear_and_layer_norm_under_autocast() -> None:
    """Under autocast a residual of another dtype is added as torch adds it, and float64 is still refused."""
    x, residual = torch.randn(3, 4), torch.randn(3, 2)
    op, norm = ops.Linear(4, 2), ops.LayerNorm(2)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(op(x, residual), F.linear(x, op.weight, op.bias) + residual)
        assert torch.equal(norm(op(x)), F.layer_norm(op(x), (2,), norm.weight, norm.bias))
        with pytest.raises(
            ValueError, match=r"linear: weight is torch\.float32, expected torch\.float64 as x"
        ):
            op(x.double())


@pytest.mark.parametrize("norm", [ops.RMSNorm, ops.GemmaRMSNorm])
def test_residual_under_autocast(norm: Any) -> None:
    """Under autocast a residual of another dtype is promoted: norm and sum are those of torch's sum.

    Registered ops, which autocast does not reach, still refuse it.
    """
    op, projection, x = norm(16), nn.Linear(16, 16), torch.randn(3, 16)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = projection(x).detach()
        assert narrow.dtype == torch.bfloat16
        for pair in ((narrow, x), (x, narrow)):
            normed, summed = op(*pair)
            assert torch.equal(summed, narrow + x)
            assert torch.equal(normed, op(narrow + x))
            compiled = torch.compile(op, backend="eager", fullgraph=True)
            assert torch.equal(compiled(*pair)[1], summed)
        with pytest.raises(
            ValueError, match=r"residual is torch\.float32, expected torch\.bfloat16 as x"
        ):
            torch.ops.opgraft.fused_add_rms_norm(narrow, x)
    with pytest.raises(
        ValueError, match=r"residual is torch\.float32, expected torch\.bfloat16 as x"
    ):
        op(narrow, x)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gradients_of_constant_gates(approximate: str) -> None:
    """A row of equal gates, which has no deviation, has finite gradients and leaves those of other rows as they are."""
    x = torch.randn(3, 10, dtype=torch.float64)
    x[1, :5] = 0.5

    def gradient(rows: torch.Tensor) -> torch.Tensor:
        leaf = rows.clone().requires_grad_()
        functional.gelu_and_mul_sparse(leaf, 0.7, approximate).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    got = gradient(x)
    assert got.isfinite().all()
    assert torch.equal(got[0::2], gradient(x[0::2]))
    assert got[0, :5].any()
    assert gradient(x[:0]).shape == (0, 10)


def test_sparse_gates_while_another_device_is_the_default() -> None:
    """The cut is a number of the host: it does not depend on the device that a context makes tensors on."""
    x = torch.randn(3, 10)
    expected = functional.gelu_and_mul_sparse(x, 0.7)
    with torch.device("meta"):
        assert torch.equal(functional.gelu_and_mul_sparse(x, 0.7), expected)
        assert ops.GeluAndMulSparse(0.7)(torch.randn(3, 10)).shape == (3, 5)


def test_gates_that_are_nan() -> None:
    """A gate that is not a number is not cut to zero."""
    x = torch.tensor([[float("nan"), -1.0, 2.0, 3.0, 3.0, 3.0]])
    got = functional.fatrelu_and_mul(x, 0.5)
    assert got[0, 0].isnan()
    assert got[0, 1:].tolist() == [0.0, 6.0]
