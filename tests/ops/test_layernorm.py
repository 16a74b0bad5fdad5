"""What is particular to the norms: the fused residual, bits that checkpoints rely on, and drop-in layer norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opgraft.ops import GemmaRMSNorm, RMSNorm

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
norms = pytest.mark.parametrize("norm", [RMSNorm, GemmaRMSNorm])


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (3 * torch.randn(*shape)).to(dtype)


@norms
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_norm_sees_the_unrounded_sum(norm: Any, dtype: torch.dtype) -> None:
    """The fused norm is that of the sum before rounding, which the rounded sum's norm is not."""
    op = norm(769).to(dtype)
    x, residual = draw(5, 769, dtype=dtype), draw(5, 769, dtype=dtype)
    normed, summed = op(x, residual)
    exact = x.float() + residual.float()
    assert torch.equal(summed, exact.to(dtype))
    assert torch.equal(normed, op.float()(exact).to(dtype))
    assert not torch.equal(normed, op.to(dtype)(summed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 769, 5125])
def test_bits_of_transformers(dtype: torch.dtype, size: int) -> None:
    """Llama's and Gemma's norms in transformers give the same bits."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    gemma = pytest.importorskip("transformers.models.gemma.modeling_gemma")
    for ours, theirs in ((RMSNorm, llama.LlamaRMSNorm), (GemmaRMSNorm, gemma.GemmaRMSNorm)):
        op, module = ours(size, 1e-5).to(dtype), theirs(size, 1e-5).to(dtype)
        weight = draw(size, dtype=dtype)
        for target in (op, module):
            target.load_state_dict({"weight": weight})
        x = draw(83, size, dtype=dtype)
        assert torch.equal(op(x), module(x))


def test_a_part_of_the_row_is_measured() -> None:
    """``var_hidden_size`` takes the mean square over the first elements and scales all of them."""
    op, x = RMSNorm(10, var_hidden_size=4), draw(3, 10)
    expected = x / (x[:, :4].square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(op(x), expected)
    assert (op.variance_size_override, RMSNorm(10, var_hidden_size=10).variance_size_override) == (
        4,
        None,
    )


def test_a_norm_without_weight_has_ones() -> None:
    """Without a weight there is nothing to train or to save, and kernels that multiply find ones of the right dtype."""
    op = RMSNorm(6, has_weight=False, dtype=torch.float16)
    assert not list(op.parameters())
    assert not op.state_dict()
    assert torch.equal(op.weight, torch.ones(6, dtype=torch.float16))
    assert op.double().weight.dtype == torch.float64
    x = draw(2, 6)
    assert torch.equal(op(x), RMSNorm(6)(x))


def test_a_weight_of_another_dtype() -> None:
    """The result has the input's dtype, and the product that of the weight."""
    x = draw(4, 9, dtype=torch.bfloat16)
    op = RMSNorm(9)
    weight = draw(9)
    op.load_state_dict({"weight": weight})
    exact = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    assert torch.equal(op(x), (exact * weight).bfloat16())


@norms
def test_overflow(norm: Any) -> None:
    """Squares that overflow float16 do not spoil the norm."""
    x = torch.full((1, 8), 60000.0, dtype=torch.float16)
    normed, summed = norm(8)(x, -x / 2)
    assert torch.isfinite(normed).all()
    assert torch.equal(summed, x / 2)


@norms
def test_attributes(norm: Any) -> None:
    """Kernels of plugins read weight, epsilon and size from the op."""
    op = norm(12, eps=1e-4)
    assert (op.hidden_size, op.variance_epsilon, tuple(op.weight.shape)) == (12, 1e-4, (12,))
    assert "12, eps=0.0001" in repr(op)


def test_dtype_of_the_weight() -> None:
    """The weight takes the dtype asked for, else the default dtype."""
    assert RMSNorm(2, dtype=torch.bfloat16).weight.dtype == torch.bfloat16
    assert RMSNorm(2).weight.dtype == torch.get_default_dtype()
