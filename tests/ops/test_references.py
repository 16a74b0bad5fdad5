"""Every op against a definition of its own in float64: one row per op, the claims below hold for each."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from opgraft import ops
from torch import Tensor
from torch.nn import functional as F

Tolerance = tuple[float, float]

TOLERANCES: dict[torch.dtype, Tolerance] = {  # atol, rtol
    torch.float64: (1e-8, 1e-8),
    torch.float32: (1e-5, 1.3e-6),
    torch.float16: (1e-3, 1e-3),
    torch.bfloat16: (1e-3, 1.6e-2),
}
WIDER_HALVES = {torch.float16: (1e-2, 1e-2), torch.bfloat16: (1e-2, 1.6e-2)}
TABLE_ROUNDED = {torch.float16: (4e-3, 1e-3), torch.bfloat16: (3e-2, 1.6e-2)}  # cosines are kept in the half type

HEADS, HEAD_SIZE, KEYS = 4, 6, 5


class Draw:
    """Reproducible random tensors of one dtype."""

    def __init__(self, seed: object, dtype: torch.dtype, *, strided: bool = False) -> None:
        self.generator = torch.Generator().manual_seed(zlib.crc32(repr(seed).encode()))
        self.dtype = dtype
        self.strided = strided

    def __call__(self, *shape: int) -> Tensor:
        values = torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(self.dtype)
        if not self.strided:
            return values
        view = torch.full((*shape[:-1], 3 * shape[-1]), math.nan, dtype=self.dtype)[..., 1::3]
        return view.copy_(values)

    def positions(self, shape: Sequence[int]) -> Tensor:
        return torch.randint(0, 32, tuple(shape), generator=self.generator)


def plain(draw: Draw, lead: Sequence[int], size: int) -> tuple[Tensor, ...]:
    return (draw(*lead, size),)


def with_residual(draw: Draw, lead: Sequence[int], size: int) -> tuple[Tensor, ...]:
    return draw(*lead, size), draw(*lead, size)


def gate_and_up(draw: Draw, lead: Sequence[int], size: int) -> tuple[Tensor, ...]:
    return (draw(*lead, 2 * size),)


def rotary_inputs(draw: Draw, lead: Sequence[int], size: int) -> tuple[Tensor, ...]:
    return draw.positions(lead), draw(*lead, 3 * HEAD_SIZE), draw(*lead, 2, HEAD_SIZE)


def rotary_tables(draw: Draw, lead: Sequence[int], size: int) -> tuple[Tensor, ...]:
    return draw(*lead, 3, 2 * size), draw(lead[-1], size), draw(lead[-1], size)


def attention_inputs(draw: Draw, lead: Sequence[int], size: int) -> tuple[Tensor, ...]:
    keys = (*lead[:-1], HEADS, KEYS, size)
    return draw(*lead[:-1], HEADS, lead[-1], size), draw(*keys), draw(*keys)


def encoder_inputs(draw: Draw, lead: Sequence[int], size: int) -> tuple[Tensor, ...]:
    batch, tokens = lead
    return draw(batch, tokens, HEADS * HEAD_SIZE), draw(batch, KEYS, 2, HEAD_SIZE), draw(batch, KEYS, 2 * HEAD_SIZE)


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def gelu(x: Tensor) -> Tensor:
    return x * torch.special.ndtr(x)


def gelu_tanh(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def rms_normalised(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps)


def rms(op: Any, x: Tensor, residual: Tensor | None = None) -> Any:
    s = x if residual is None else x + residual
    y = rms_normalised(s, op.variance_epsilon) * (op.weight.double() if op.has_weight else 1)
    return y if residual is None else (y, s)


def gemma_rms(op: Any, x: Tensor, residual: Tensor | None = None) -> Any:
    s = x if residual is None else x + residual
    y = rms_normalised(s, op.variance_epsilon)
    y = y + y * op.weight.double()
    return y if residual is None else (y, s)


def layer_norm(op: Any, x: Tensor) -> Tensor:
    centred = x - x.sum(-1, keepdim=True) / x.shape[-1]
    return rms_normalised(centred, op.eps) * op.weight.double() + op.bias.double()


def gated(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda op, x: activation(x[..., : x.shape[-1] // 2]) * x[..., x.shape[-1] // 2 :]


def rotated(x: Tensor, angles: Tensor, neox: bool) -> Tensor:
    """Pairs as complex numbers, turned by ``angles``."""
    n = x.shape[-1] // 2
    real, imaginary = (x[..., :n], x[..., n:]) if neox else (x[..., ::2], x[..., 1::2])
    turned = torch.complex(real.contiguous(), imaginary.contiguous()) * torch.exp(1j * angles)
    parts = (turned.real, turned.imag)
    return torch.cat(parts, -1) if neox else torch.stack(parts, -1).flatten(-2)


def rotary(op: Any, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    theta = op.base ** (-torch.arange(0, op.rotary_dim, 2, dtype=torch.float64) / op.rotary_dim)
    angles = (positions.double()[..., None] * theta)[..., None, :]

    def embedded(x: Tensor) -> Tensor:
        heads = x.reshape(*positions.shape, math.prod(x.shape[positions.dim() :]) // op.head_size, op.head_size)
        turned = rotated(heads[..., : op.rotary_dim], angles, op.is_neox_style)
        return torch.cat((turned, heads[..., op.rotary_dim :]), -1).reshape(x.shape)

    return embedded(query), embedded(key)


def apply_rotary(op: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    n = x.shape[-1] // 2
    first, second = (x[..., :n], x[..., n:]) if op.is_neox_style else (x[..., ::2], x[..., 1::2])
    cos, sin = cos[:, None], sin[:, None]
    parts = (first * cos - second * sin, first * sin + second * cos)
    return torch.cat(parts, -1) if op.is_neox_style else torch.stack(parts, -1).flatten(-2)


def attention(op: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = torch.einsum("...qe,...ke->...qk", query, key) / math.sqrt(query.shape[-1])
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return torch.einsum("...qk,...ke->...qe", weights / weights.sum(-1, keepdim=True), value)


def encoder_attention(op: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    def heads(x: Tensor, n: int) -> Tensor:
        split = x.reshape(*x.shape[:2], n, op.head_size)
        return split[:, :, torch.arange(op.num_heads) * n // op.num_heads].transpose(1, 2)

    attended = attention(op, heads(query, op.num_heads), heads(key, 2), heads(value, 2))
    return attended.transpose(1, 2).reshape(query.shape)


LEADS = ((1,), (7,), (2, 3), (2, 1, 3), (0,), (2, 0))
SIZES = (1, 9, 769)


@dataclass(frozen=True)
class Row:
    """An op: how to build it for a size, inputs for it, its definition, and torch's function for it."""

    name: str
    build: Callable[[int, torch.dtype], Any]
    reference: Callable[..., Any]
    inputs: Callable[[Draw, Sequence[int], int], tuple[Tensor, ...]] = plain
    functional: Callable[..., Any] | None = None
    leads: tuple[tuple[int, ...], ...] = LEADS
    sizes: tuple[int, ...] = SIZES
    tolerances: dict[torch.dtype, Tolerance] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def op(self, size: int, dtype: torch.dtype, seed: object = 0) -> Any:
        """The op with random parameters."""
        op, draw = self.build(size, dtype).to(dtype), Draw((self.name, seed), dtype)
        for parameter in op.parameters():
            parameter.data = draw(*parameter.shape)
        return op


def rope(**options: Any) -> Callable[[int, torch.dtype], Any]:
    settings = {"rotary_dim": HEAD_SIZE, "max_position_embeddings": 32, "base": 100.0, "is_neox_style": True, **options}
    return lambda size, dtype: ops.RotaryEmbedding(HEAD_SIZE, dtype=dtype, **settings)


def linear(op: Any, x: Tensor) -> Tensor:
    return torch.einsum("...i,oi->...o", x, op.weight.double()) + op.bias.double()


def torch_swiglu(op: Any, x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def torch_geglu(op: Any, x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.gelu(gate, approximate=op.approximate) * up


def torch_gelu_tanh(op: Any, x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def torch_rms_norm(op: Any, x: Tensor) -> Tensor:
    weight = op.weight if isinstance(op, ops.RMSNorm) else 1 + op.weight
    return F.rms_norm(x, x.shape[-1:], weight, op.variance_epsilon)


def torch_layer_norm(op: Any, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], op.weight, op.bias)


NORM: Any = {"tolerances": WIDER_HALVES}
ROPE: Any = {
    "inputs": rotary_inputs,
    "leads": ((1,), (7,), (2, 3), (0,), (2, 0)),
    "sizes": (1,),
    "tolerances": TABLE_ROUNDED,
}
TURN: Any = {"inputs": rotary_tables}
SDPA: Any = {
    "inputs": attention_inputs,
    "leads": ((2, 1), (2, 7), (2, 0), (0, 3), (2, 3, 4)),
    "sizes": (1, 9, 64),
    "tolerances": WIDER_HALVES,
}
ENCODER: Any = {
    "inputs": encoder_inputs,
    "leads": ((1, 1), (2, 7), (2, 0), (0, 3)),
    "sizes": (1,),
    "tolerances": WIDER_HALVES,
}

ROWS = [
    Row("rms_norm", lambda n, _: ops.RMSNorm(n), rms, plain, torch_rms_norm, **NORM),
    Row("rms_norm+residual", lambda n, _: ops.RMSNorm(n, 1e-5), rms, with_residual, **NORM),
    Row("rms_norm-weight", lambda n, _: ops.RMSNorm(n, has_weight=False), rms, **NORM),
    Row("gemma_rms_norm", lambda n, _: ops.GemmaRMSNorm(n), gemma_rms, plain, torch_rms_norm, **NORM),
    Row("gemma_rms_norm+residual", lambda n, _: ops.GemmaRMSNorm(n, 1e-5), gemma_rms, with_residual, **NORM),
    Row("layer_norm", lambda n, _: ops.LayerNorm(n), layer_norm, plain, torch_layer_norm, **NORM),
    Row("silu_and_mul", lambda n, _: ops.SiluAndMul(), gated(silu), gate_and_up, torch_swiglu),
    Row("gelu_and_mul", lambda n, _: ops.GeluAndMul(), gated(gelu), gate_and_up, torch_geglu),
    Row("gelu_and_mul~tanh", lambda n, _: ops.GeluAndMul("tanh"), gated(gelu_tanh), gate_and_up, torch_geglu),
    Row("gelu_new", lambda n, _: ops.NewGELU(), lambda op, x: gelu_tanh(x), plain, torch_gelu_tanh),
    Row("gelu_fast", lambda n, _: ops.FastGELU(), lambda op, x: gelu_tanh(x), plain, torch_gelu_tanh),
    Row("quick_gelu", lambda n, _: ops.QuickGELU(), lambda op, x: silu(1.702 * x) / 1.702),
    Row("gelu", lambda n, _: ops.GELU(), lambda op, x: gelu(x), plain, lambda op, x: F.gelu(x)),
    Row("gelu~tanh", lambda n, _: ops.GELU("tanh"), lambda op, x: gelu_tanh(x), plain, torch_gelu_tanh),
    Row("silu", lambda n, _: ops.SiLU(), lambda op, x: silu(x), plain, lambda op, x: F.silu(x)),
    Row("linear", lambda n, _: ops.Linear(n, 5), linear, plain, lambda op, x: F.linear(x, op.weight, op.bias)),
    Row("rotary_embedding", rope(), rotary, **ROPE),
    Row("rotary_embedding~gptj", rope(is_neox_style=False), rotary, **ROPE),
    Row("rotary_embedding~partial", rope(rotary_dim=4), rotary, **ROPE),
    Row("rotary_embedding~gptj partial", rope(rotary_dim=2, is_neox_style=False), rotary, **ROPE),
    Row("apply_rotary_emb", lambda n, _: ops.ApplyRotaryEmb(), apply_rotary, **TURN),
    Row("apply_rotary_emb~gptj", lambda n, _: ops.ApplyRotaryEmb(is_neox_style=False), apply_rotary, **TURN),
    Row("scaled_dot_product_attention", lambda n, _: ops.ScaledDotProductAttention(), attention, **SDPA),
    Row(
        "mm_encoder_attn",
        lambda n, _: ops.MMEncoderAttention(HEADS, HEAD_SIZE, num_kv_heads=2),
        encoder_attention,
        **ENCODER,
    ),
]

rows = pytest.mark.parametrize("row", ROWS, ids=str)
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def double(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [x.double() if x.is_floating_point() else x for x in inputs]


@rows
@dtypes
def test_definition(row: Row, dtype: torch.dtype) -> None:
    """The result is that of the definition in float64, in the input's dtype and shape, for 1-D leads to 3-D ones."""
    atol, rtol = {**TOLERANCES, **row.tolerances}[dtype]
    for size in row.sizes:
        op = row.op(size, dtype, "definition")
        for lead in row.leads:
            inputs = row.inputs(Draw((row.name, lead, size), dtype), lead, size)
            with torch.no_grad():
                results, expected = tensors(op(*inputs)), tensors(row.reference(op, *double(inputs)))
            assert len(results) == len(expected)
            for got, wanted in zip(results, expected, strict=True):
                assert got.dtype == dtype
                torch.testing.assert_close(got.double(), wanted, atol=atol, rtol=rtol)


@rows
def test_strides(row: Row) -> None:
    """Views with gaps between their elements give what contiguous tensors give."""
    op = row.op(9, torch.float32)
    lead = row.leads[1]
    views = row.inputs(Draw(row.name, torch.float32, strided=True), lead, 9)
    assert not any(x.is_contiguous() for x in views if x.is_floating_point())
    expected = tensors(op(*(x.contiguous() for x in views)))
    for got, wanted in zip(tensors(op(*views)), expected, strict=True):
        torch.testing.assert_close(got, wanted)


@rows
@dtypes
def test_inputs_stay(row: Row, dtype: torch.dtype) -> None:
    """No input is written to, and no result shares memory with an input or with another result."""
    op = row.op(9, dtype)
    inputs = row.inputs(Draw(row.name, dtype), row.leads[1], 9)
    before = [x.clone() for x in inputs]
    results = tensors(op(*inputs))
    for x, old in zip(inputs, before, strict=True):
        assert torch.equal(x, old)
    memory = [x.untyped_storage().data_ptr() for x in (*inputs, *results)]
    assert len(set(memory)) == len(memory)


def by_parameters(op: Any, inputs: Sequence[Tensor]) -> tuple[Callable[..., Any], list[Tensor]]:
    """``op`` as a function of its differentiable inputs and parameters, and those."""
    parameters = dict(op.named_parameters())
    variables = [x.detach().requires_grad_() for x in (*inputs, *parameters.values()) if x.is_floating_point()]
    fixed = [x for x in inputs if not x.is_floating_point()]

    def call(*values: Tensor) -> Any:
        given = values[: len(values) - len(parameters)]
        weights = dict(zip(parameters, values[len(given) :], strict=True))
        return torch.func.functional_call(op, weights, (*fixed, *given))

    return call, variables


@rows
def test_gradcheck(row: Row) -> None:
    """In float64 the gradients by inputs and parameters are those of finite differences."""
    size = 3 if 9 in row.sizes else row.sizes[0]
    lead = (1, 2) if all(len(lead) > 1 for lead in row.leads) else (2,)
    op = row.op(size, torch.float64)
    call, variables = by_parameters(op, row.inputs(Draw(row.name, torch.float64), lead, size))
    assert torch.autograd.gradcheck(call, variables)


@pytest.mark.parametrize("row", [row for row in ROWS if row.functional], ids=str)
def test_torch_gradients(row: Row) -> None:
    """In float32 results and gradients are those of torch's own function."""
    assert row.functional is not None
    op = row.op(9, torch.float32)
    inputs = [x.requires_grad_() for x in row.inputs(Draw(row.name, torch.float32), row.leads[1], 9)]
    leaves = [*inputs, *op.parameters()]
    got, wanted = op(*inputs), row.functional(op, *inputs)
    torch.testing.assert_close(got, wanted)
    upstream = Draw("upstream", torch.float32)(*got.shape)
    got_gradients, wanted_gradients = (
        torch.autograd.grad(got, leaves, upstream),
        torch.autograd.grad(wanted, leaves, upstream),
    )
    torch.testing.assert_close(got_gradients, wanted_gradients)


def test_rows_cover_the_catalogue() -> None:
    """Every op class that the catalogue exports has a row."""
    exported = {value for value in map(vars(ops).get, ops.__all__) if isinstance(value, type)}
    bases = {ops.CustomOp, ops.PluggableLayer, ops.RotaryEmbeddingBase}
    assert {row.op(1, torch.float32).op_class for row in ROWS} == exported - bases
