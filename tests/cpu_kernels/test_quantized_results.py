"""Kernels that quantise their results: the bits of one kernel after the other, and the values of float64 references."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

import opgraft
import pytest
import torch
from opgraft import CompilationConfig, functional
from opgraft.ops import QuantFP8, RMSNorm, ScaledDotProductAttention, SiluAndMul
from torch import Tensor, nn

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (2, 66, 770, 5126)
GROUPS = ((-1, -1), (1, -1), (1, 64))
EPS = 1e-5
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no g++ to build the kernels with")


def rows(count: int, width: int, dtype: torch.dtype) -> Tensor:
    """Rows of contiguous elements with a gap of NaN between them."""
    x = torch.full((count, width + 3), torch.nan, dtype=dtype)[:, 1:-2]
    return x.copy_(3 * torch.randn(count, width))


def same(found: Any, expected: Any) -> None:
    """Compare tensors bit for bit."""
    found = [found] if isinstance(found, Tensor) else found
    expected = [expected] if isinstance(expected, Tensor) else expected
    for one, other in zip(found, expected, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=0, equal_nan=True)


def scale_of(shape: Sequence[int], group_shape: tuple[int, int]) -> Tensor:
    from opgraft.kernels import scale_shape

    return torch.rand(scale_shape(shape, group_shape)) / 50 + 0.01


@each_dtype
def test_norms_have_the_bits_of_two_kernels(path: str, kernels: Any, dtype: torch.dtype) -> None:
    """A norm, and a norm after a sum, are quantised as by separate kernels, of rows at a distance and of none."""
    for width in WIDTHS:
        for count in (0, 1, 17):
            for group_shape in GROUPS:
                check_norms(dtype, count, width, group_shape)


def check_norms(dtype: torch.dtype, count: int, width: int, group_shape: tuple[int, int]) -> None:
    from opgraft_cpu_kernels import kernels

    x, residual = rows(count, width, dtype), rows(count, width, dtype)
    for weight in (torch.randn(width).to(dtype), torch.randn(width), None):
        normed = kernels.rms_norm(x, weight, EPS)
        both, summed = kernels.fused_add_rms_norm(x, residual, weight, EPS)
        scale = scale_of(x.shape, group_shape)
        same(
            kernels.rms_norm_quant_fp8_static(x, scale, group_shape, weight, EPS),
            kernels.quant_fp8_static(normed, scale, group_shape),
        )
        same(
            kernels.fused_add_rms_norm_quant_fp8_static(
                x, residual, scale, group_shape, weight, EPS
            ),
            (kernels.quant_fp8_static(both, scale, group_shape), summed),
        )
        same(
            kernels.rms_norm_quant_fp8_dynamic(x, group_shape, weight, EPS, None, True),
            kernels.quant_fp8_dynamic(normed, group_shape, None, True),
        )
        same(
            kernels.fused_add_rms_norm_quant_fp8_dynamic(x, residual, group_shape, weight, EPS),
            (*kernels.quant_fp8_dynamic(both, group_shape), summed),
        )


@each_dtype
def test_products_have_the_bits_of_two_kernels(path: str, kernels: Any, dtype: torch.dtype) -> None:
    """A gated activation is quantised as the separate kernels do it."""
    from opgraft_cpu_kernels import kernels as forms

    for width in WIDTHS:
        for count in (0, 1, 17):
            x = rows(count, 2 * width, dtype)
            product = forms.silu_and_mul(x)
            for group_shape in GROUPS:
                scale = scale_of(product.shape, group_shape)
                same(
                    forms.silu_and_mul_quant_fp8_static(x, scale, group_shape),
                    forms.quant_fp8_static(product, scale, group_shape),
                )
                same(
                    forms.silu_and_mul_quant_fp8_dynamic(x, group_shape),
                    forms.quant_fp8_dynamic(product, group_shape),
                )


@each_dtype
@pytest.mark.parametrize("tokens", [1, 5, 200, 401])
def test_heads_have_the_bits_of_two_kernels(
    path: str, kernels: Any, dtype: torch.dtype, tokens: int
) -> None:
    """Attention is quantised as the separate kernels do it, with shared key heads, views and several tiles."""
    from opgraft_cpu_kernels import dense_attention
    from opgraft_cpu_kernels import kernels as forms

    fused = dense_attention.scaled_dot_product_attention_quant_fp8_static
    scale = torch.tensor([0.02])
    query, key, value = (
        torch.randn(2, tokens, heads, size).to(dtype).transpose(1, 2)
        for heads, size in ((4, 24), (2, 24), (2, 17))
    )
    for causal in (False, True):
        attended = dense_attention.scaled_dot_product_attention(
            query, key, value, None, 0.0, causal, None, True
        )
        found = fused(query, key, value, scale, None, causal, None, True)
        same(found, forms.quant_fp8_static(attended, scale, (-1, -1)))
        assert found.is_contiguous()


@each_dtype
def test_a_mask_has_the_bits_of_two_kernels(path: str, kernels: Any, dtype: torch.dtype) -> None:
    """Attention with a mask is quantised as the separate kernels do it."""
    from opgraft_cpu_kernels import dense_attention
    from opgraft_cpu_kernels import kernels as forms

    query, key, value = (torch.randn(2, 4, 37, 24).to(dtype) for _ in range(3))
    mask, scale = (torch.randn(37, 37) > 0).fill_diagonal_(True), torch.tensor([0.02])
    attended = dense_attention.scaled_dot_product_attention(query, key, value, mask)
    found = dense_attention.scaled_dot_product_attention_quant_fp8_static(
        query, key, value, scale, mask
    )
    same(found, forms.quant_fp8_static(attended, scale, (-1, -1)))


@each_dtype
def test_bounds_and_numbers_without_end_have_the_bits_of_two_kernels(
    path: str, kernels: Any, dtype: torch.dtype
) -> None:
    """A largest scale holds, and rows with NaN and infinity are quantised as the separate kernels do it."""
    from opgraft_cpu_kernels import kernels as forms

    x, weight, bound = rows(5, 66, dtype), torch.randn(66).to(dtype), torch.tensor([0.5])
    x[1, 7], x[3, 9] = torch.nan, torch.inf
    normed = forms.rms_norm(x, weight, EPS)
    found = forms.rms_norm_quant_fp8_dynamic(x, (1, -1), weight, EPS, bound)
    same(found, forms.quant_fp8_dynamic(normed, (1, -1), bound))
    assert not torch.equal(found[1][0], forms.quant_fp8_dynamic(normed, (1, -1))[1][0])
    same(
        forms.rms_norm_quant_fp8_dynamic(x, (1, -1), weight, EPS),
        forms.quant_fp8_dynamic(normed, (1, -1)),
    )


def test_compiled_code_calls_the_kernel(kernels: Any) -> None:
    """In one graph, with the bits of a call outside of it."""
    x, weight = torch.randn(3, 66), torch.randn(66)
    form = functional.rms_norm_quant_fp8_dynamic
    compiled = torch.compile(form, fullgraph=True, backend="aot_eager")
    same(compiled(x, (1, -1), weight, EPS), form(x, (1, -1), weight, EPS))


@each_dtype
def test_values_are_those_in_float64(path: str, kernels: Any, dtype: torch.dtype) -> None:
    """Quantised numbers times their scales are within half a step of what float64 computes."""
    x, residual, weight = rows(9, 769, dtype), rows(9, 769, dtype), torch.randn(769).to(dtype)
    summed = x.double() + residual.double()
    normed = summed / (summed.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    quantised, scales, total = functional.fused_add_rms_norm_quant_fp8_dynamic(
        x, residual, (1, -1), weight, EPS
    )
    expect_close(quantised.double() * scales.double(), normed, scales.double())
    torch.testing.assert_close(total.double(), summed, rtol=8e-3, atol=1e-5)


def expect_close(found: Tensor, expected: Tensor, scales: Tensor) -> None:
    """A number of e4m3 is within 1/16 of its size, below the least normal one within half a step.

    Rounding to half types in between may add a little.
    """
    distance = (found - expected).abs()
    assert bool((distance <= expected.abs() * (2**-4 + 2**-7) + scales * 2**-9).all())


def test_other_formats_run_the_definition(plugin: object) -> None:
    """Formats, groups and scales that the kernels do not take are computed by the definition."""
    x, weight = torch.randn(4, 12), torch.randn(12)
    for settings in (
        ((1, -1), weight, EPS, None, False, torch.float8_e5m2),
        ((-1, 1), weight, EPS),
    ):
        same(
            functional.rms_norm_quant_fp8_dynamic(x, *settings),
            functional.rms_norm_quant_fp8_dynamic.native(x, *settings),
        )
    with pytest.raises(ValueError, match="scale"):
        functional.rms_norm_quant_fp8_static(x, torch.ones(3), (1, -1), weight, EPS)


class Quantizing(nn.Module):
    """A norm, a gated activation and attention, each quantised."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = RMSNorm(width), RMSNorm(width)
        self.act, self.attention = SiluAndMul(), ScaledDotProductAttention()
        self.by_token, self.by_scale = QuantFP8(False, (1, -1)), QuantFP8(True, (-1, -1))
        self.register_buffer("scale", torch.tensor([0.02]))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        summed = x + x.flip(-1) * 0.5
        heads = x.view(x.shape[0], 2, 4, -1)
        attended = self.attention(heads, heads, heads)
        return (
            *self.by_token(self.first(x)),
            *self.by_token(self.second(summed)),
            *self.by_scale(self.act(x), self.scale),
            self.by_scale(attended, self.scale)[0],
            summed,
        )


def test_passes_join_what_these_kernels_compute_alone(plugin: object) -> None:
    """Compiled code runs the joined kernels in the place of the separate ones, and computes the same bits."""
    model = Quantizing(64).eval().requires_grad_(False)
    compiled = opgraft.compile(model, CompilationConfig(level=1), args=(torch.randn(3, 64),))
    replaced = {report.name: report.replaced for report in compiled.passes}
    names = ("rms_norm_quant_fp8", "silu_and_mul_quant_fp8", "attention_quant_fp8")
    assert [replaced[name] for name in names] == [2, 1, 1]
    chosen = {part.subject: str(part.chosen) for part in compiled.decision.parts}
    joined = [name for subject, name in chosen.items() if "quant" in subject]
    assert len(joined) == 4
    assert not any("native" in name for name in joined)
    for count in (1, 2, 9):
        x = torch.randn(count, 64)
        same(compiled(x), model(x))
