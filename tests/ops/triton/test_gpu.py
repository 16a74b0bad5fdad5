"""The Triton kernels on a GPU: the specs' inputs, larger shapes, and offsets beyond 32 bits: ``pytest -m gpu``."""

from __future__ import annotations

import dataclasses
from typing import Any

import opgraft
import pytest
import torch
from opgraft import functional, ops
from opgraft.ops.on_triton import triton_kernels
from opgraft.ops.spec import OpSpec
from opgraft.testing import checks
from opgraft.testing.catalogue import SPECS

pytest.importorskip("triton", reason="Triton is not installed here")

pytestmark = pytest.mark.gpu

TRITON = triton_kernels()
CASES = [(SPECS[name], variant) for name in TRITON for variant in SPECS[name].variants]

each_case = pytest.mark.parametrize(
    ("spec", "variant"),
    CASES,
    ids=[spec.functional.name + (f"~{variant}" if variant else "") for spec, variant in CASES],
)


def on_gpu(spec: OpSpec) -> OpSpec:
    """The spec with its arguments on the GPU, laid out as they were: a copy of a view would close its gaps."""
    return dataclasses.replace(spec, device="cuda")


@each_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values(spec: OpSpec, variant: str, dtype: torch.dtype) -> None:
    """Each kernel computes what the reference computes in float64: small, empty and realistic inputs."""
    checks.check_values(on_gpu(spec), variant, dtype, TRITON[spec.functional.name])


@each_case
def test_strides(spec: OpSpec, variant: str) -> None:
    """Views with gaps between their elements, which hold NaN, give what contiguous tensors give."""
    checks.check_strides(on_gpu(spec), variant, TRITON[spec.functional.name])


@pytest.mark.parametrize("width", [4096, 5120, 16384, 16385, 50_000])
def test_widths(width: int) -> None:
    """Rows that a program holds in registers, and wider ones, are normalised alike."""
    x, residual = (torch.randn(33, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(width, device="cuda", dtype=torch.bfloat16)
    got = TRITON["fused_add_rms_norm"](x, residual, weight)
    expected = functional.fused_add_rms_norm.native(x.double(), residual.double(), weight.double())
    for ours, exact in zip(got, expected, strict=True):
        torch.testing.assert_close(ours.double(), exact, atol=1e-2, rtol=1.6e-2)


@pytest.mark.parametrize("form", ["silu", "silu_and_mul", "rms_norm"])
def test_offsets_beyond_32_bits(form: str) -> None:
    """The last rows of a tensor of more than 2³¹ elements are as right as the first."""
    rows = 2**31 // 4096 + 8
    x = torch.empty(rows, 4096, device="cuda", dtype=torch.bfloat16)
    for part in (x[:8], x[-8:]):
        part.normal_()
    got = TRITON[form](x)
    for part in (slice(8), slice(-8, None)):
        exact = SPECS[form].functional.native(x[part].double())
        torch.testing.assert_close(got[part].double(), exact, atol=1e-2, rtol=1.6e-2)


BATCHES = {
    "one token": ([1], [20_000]),
    "decodes": ([1] * 40, [1 + 97 * i for i in range(40)]),
    "prompts and decodes": ([700, 1, 0, 1, 90], [700, 3000, 5, 1, 4000]),
}
"""Tokens of each sequence in the query, and in all."""


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    "settings", [{}, {"sliding_window": 1000, "logits_soft_cap": 5.0}], ids=["plain", "window"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_attention_of_batches(batch: str, settings: dict[str, Any], dtype: torch.dtype) -> None:
    """Batches as engines have them, long contexts among them, attend as in float64; NaN beside them is not read."""
    counts, lengths = (torch.tensor(numbers, device="cuda") for numbers in BATCHES[batch])
    blocks = (lengths + 15) // 16
    table = torch.zeros(len(counts), int(blocks.max()), device="cuda", dtype=torch.int32)
    cache = torch.full((int(blocks.sum()), 2, 2, 16, 128), torch.nan, device="cuda", dtype=dtype)
    own = torch.randperm(len(cache), device="cuda").split(blocks.tolist())
    for row, places, length in zip(table, own, lengths.tolist(), strict=True):
        row[: len(places)] = places
        slots = (places[:, None] * 16 + torch.arange(16, device="cuda")).flatten()[:length]
        key, value = torch.randn(2, length, 2, 128, device="cuda", dtype=dtype)
        functional.write_kv_cache(key, value, cache, slots)
    query = torch.randn(int(counts.sum()), 8, 128, device="cuda", dtype=dtype)
    places = (table, torch.nn.functional.pad(counts.cumsum(0), (1, 0)), lengths, 0.1)
    got = TRITON["paged_attention"](query, cache, *places, **settings)
    exact = functional.paged_attention.native(query.double(), cache.double(), *places, **settings)
    atol, rtol = SPECS["paged_attention"].tolerance(dtype)
    torch.testing.assert_close(got.double(), exact, atol=atol, rtol=rtol)


def test_ops_are_bound_to_the_kernels() -> None:
    """On a GPU an op and its functional form run the Triton kernel, and a compiled op computes the same."""
    op = ops.RMSNorm(4096).to("cuda", torch.bfloat16)
    assert op.decision.chosen == "RMSNorm.forward_cuda"
    x = torch.randn(7, 4096, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        eager = op(x)
        assert torch.equal(eager, functional.rms_norm(x, op.weight, op.variance_epsilon))
        assert torch.equal(eager, torch.compile(op, fullgraph=True)(x))
    opgraft.reset()


def test_gradients_take_the_native_definition() -> None:
    """Where a gradient is required, an op on a GPU is differentiable."""
    op = ops.GemmaRMSNorm(64).to("cuda")
    op(torch.randn(3, 64, device="cuda")).square().sum().backward()
    assert op.weight.grad is not None
