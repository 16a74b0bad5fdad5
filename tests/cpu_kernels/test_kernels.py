"""What the specs of opgraft do not reach: rows at a distance, special values, ops without a form, threads."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from opgraft import functional
from torch import Tensor
from torch.nn import functional as F

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (1, 9, 769, 5125)
TOLERANCES = {
    torch.float32: (1e-5, 1.3e-6),
    torch.bfloat16: (1e-3, 1.6e-2),
    torch.float16: (1e-3, 1e-3),
}
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no g++ to build the kernels with")


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return (3 * torch.randn(*shape)).to(dtype)


def rows(count: int, width: int, dtype: torch.dtype) -> Tensor:
    """Rows of contiguous elements with a gap of NaN between them."""
    return torch.full((count, width + 3), torch.nan, dtype=dtype)[:, 1:-2].copy_(
        draw(count, width, dtype=dtype)
    )


def rms(x: Tensor, weight: Tensor | float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def close(got: Tensor, expected: Tensor) -> None:
    atol, rtol = TOLERANCES[got.dtype]
    torch.testing.assert_close(got.double(), expected, atol=atol, rtol=rtol, equal_nan=True)


@each_dtype
def test_rows_at_a_distance(path: str, kernels: Any, dtype: torch.dtype) -> None:
    """Rows of a larger matrix are read where they lie, and the elements between them are not."""
    for width in WIDTHS:
        for count in (0, 1, 17):
            check_rows(kernels, dtype, width, count)


def check_rows(kernels: Any, dtype: torch.dtype, width: int, count: int) -> None:
    x, weight = rows(count, width, dtype), draw(width, dtype=dtype)
    wide, gain = x.double(), weight.double()
    close(kernels.rms_norm(x, weight), rms(wide, gain))
    close(kernels.layer_norm(x, [width], weight, weight), F.layer_norm(wide, [width], gain, gain))
    close(kernels.silu(x), F.silu(wide))
    close(kernels.gelu(x), F.gelu(wide))
    gated = rows(count, 2 * width, dtype)
    gate, up = gated.double().chunk(2, -1)
    close(kernels.silu_and_mul(gated), F.silu(gate) * up)


@each_dtype
def test_results_in_memory_of_the_caller(path: str, kernels: Any, dtype: torch.dtype) -> None:
    """The variants that write to given tensors do so whatever their strides are, and leave the gaps alone."""
    for width in WIDTHS:
        check_results_in_memory_of_the_caller(kernels, dtype, width)


def check_results_in_memory_of_the_caller(kernels: Any, dtype: torch.dtype, width: int) -> None:
    x, weight = draw(5, width, dtype=dtype), draw(width, dtype=dtype)
    for out in (
        torch.empty(5, width, dtype=dtype),
        rows(5, width, dtype),
        torch.empty(width, 5, dtype=dtype).T,
    ):
        assert kernels.rms_norm_out(x, out, weight) is None
        close(out, rms(x.double(), weight.double()))
    inner, residual = rows(5, width, dtype), draw(width, 5, dtype=dtype).T
    total = inner.double() + residual.double()
    kernels.fused_add_rms_norm_(inner, residual, weight)
    close(inner, rms(total, weight.double()))
    close(residual, total)
    assert inner._base is not None
    assert inner._base[:, [0, -2, -1]].isnan().all()


@each_dtype
def test_layer_norm_of_a_sum(path: str, kernels: Any, dtype: torch.dtype) -> None:
    """The norm is that of the unrounded sum, which is returned rounded."""
    for width in WIDTHS:
        check_layer_norm_of_a_sum(kernels, dtype, width)


def check_layer_norm_of_a_sum(kernels: Any, dtype: torch.dtype, width: int) -> None:
    x, residual, bias = (draw(5, width, dtype=dtype) for _ in range(3))
    normed, total = kernels.add_layer_norm(x, residual, [width], bias[0], bias[1])
    exact = x.double() + residual.double()
    atol = 1e-2 if dtype != torch.float32 else 1e-5
    expected = F.layer_norm(exact, [width], bias[0].double(), bias[1].double())
    torch.testing.assert_close(normed.double(), expected, atol=atol, rtol=TOLERANCES[dtype][1])
    close(total, exact)


@each_dtype
def test_int8(path: str, kernels: Any, dtype: torch.dtype) -> None:
    """Values are divided by the row's largest over 127 and rounded to nearest, ties to even; zeros stay zeros."""
    for width in WIDTHS:
        check_int8(kernels, dtype, width)


def check_int8(kernels: Any, dtype: torch.dtype, width: int) -> None:
    x = draw(6, width, dtype=dtype)
    x[2] = 0
    quantised, scale = kernels.quant_int8_dynamic(x)
    assert (quantised.dtype, scale.shape) == (torch.int8, (6, 1))
    torch.testing.assert_close(
        scale, (x.float().abs().amax(-1, keepdim=True) / 127).clamp(min=1.17549435e-38)
    )
    assert torch.equal(quantised.float(), (x.float() / scale).round())


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "quick_gelu", "relu2"])
def test_the_whole_range(path: str, kernels: Any, name: str) -> None:
    """Activations stay right where exponentials overflow or vanish, and hand NaN on."""
    exact = {
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu2": lambda x: x.relu().square(),
    }
    exact |= {"silu": F.silu, "gelu": F.gelu, "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x)}
    x = torch.cat(
        [
            torch.linspace(-30, 30, 100001),
            torch.logspace(-45, 15, 5000),
            -torch.logspace(-45, 38, 5000),
        ]
    )
    close(getattr(kernels, name)(x), exact[name](x.double()))
    assert getattr(kernels, name)(torch.full((33,), torch.nan)).isnan().all()


GATED: dict[str, tuple[Any, ...]] = {
    "silu_and_mul": (),
    "mul_and_silu": (),
    "gelu_and_mul": (),
    "gelu_and_mul_sparse": (0.7,),
    "fatrelu_and_mul": (0.5,),
    "silu_and_mul_with_clamp": (7.0,),
    "swiglustep_and_mul": (7.0,),
    "swigluoai_and_mul": (1.702, 7.0),
}


@each_dtype
@pytest.mark.parametrize("name", list(GATED))
def test_the_whole_range_of_gates(path: str, kernels: Any, name: str, dtype: torch.dtype) -> None:
    """Gated activations are their definitions for NaN, infinities and numbers near the ends of float32 too."""
    special = torch.tensor(
        [torch.nan, torch.inf, -torch.inf, 1e38, -1e38, 1e30, -1e30, 1e-40, 0.5, 0.0, -0.0, -3.0]
    )
    x = torch.cartesian_prod(special, special).to(dtype)
    for width in (1, 3, 144):  # vectors, and the rests of rows
        rows = x.T.reshape(2, -1, width).transpose(0, 1)
        rows = rows.transpose(1, 2) if name == "swigluoai_and_mul" else rows
        rows = rows.reshape(-1, 2 * width)
        # Torch's own GELU in float32 loses the digits of its tail, and makes NaN of infinity.
        wide = rows.double() if name == "gelu_and_mul" else rows.float()
        expected = getattr(functional, name).native(wide, *GATED[name]).to(dtype)
        got = getattr(kernels, name)(rows, *GATED[name])
        rtol = 2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
        torch.testing.assert_close(
            got,
            expected,
            rtol=rtol,
            atol=1e-44 if dtype != torch.bfloat16 else 1e-37,
            equal_nan=True,
        )


@each_dtype
def test_gates_of_a_row_that_are_cut(path: str, kernels: Any, dtype: torch.dtype) -> None:
    """The share of gates that becomes zero is the one asked for; of gates that are all the same, all do."""
    x = torch.randn(3, 2 * 5125).to(dtype)
    for sparsity in (0.05, 0.5, 0.95):
        for approximate in ("none", "tanh"):
            got = kernels.gelu_and_mul_sparse(x, sparsity, approximate)
            close(got, functional.gelu_and_mul_sparse.native(x.double(), sparsity, approximate))
            assert abs(float((got == 0).double().mean()) - sparsity) < 0.03
    x[1] = 0.75
    assert not kernels.gelu_and_mul_sparse(x, 0.5)[1].any()


@each_dtype
def test_the_whole_range_of_xielu(path: str, kernels: Any, dtype: torch.dtype) -> None:
    """Where ``e^x - 1`` nearly is ``x``, far from zero, for NaN and infinities, xIELU is its definition."""
    orders, special = (
        torch.logspace(-45, 30, 5000),
        torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 0.0]),
    )
    x = torch.cat([torch.linspace(-30, 30, 10001), orders, -orders, special.repeat(7)]).to(dtype)
    for numbers in (
        (-3.0, 0.25, 0.5, -1e-6),
        (25.0, -25.0, 0.0, -1e-6),
        (0.3, 1.5, 0.5, -0.75),
        (0.3, 1.5, 0.5, 2.0),
    ):
        alphas, settings = torch.tensor(numbers[:2], dtype=dtype), numbers[2:]
        exact = functional.xielu.native(x.double(), *alphas.double(), *settings)
        close(kernels.xielu(x, *alphas, *settings), exact.to(dtype).double())


def test_xielu_near_zero(path: str, kernels: Any) -> None:
    """What is left where the slope at zero is none has all its digits, which ``e^x - 1``, less ``x``, has not."""
    x, alpha = (
        torch.cat([-torch.logspace(-5.5, 2, 10001), torch.logspace(-5.5, 2, 10001)]),
        torch.zeros(1),
    )
    exact = functional.xielu.native(x.double(), alpha.double(), alpha.double(), 0.0)
    torch.testing.assert_close(
        kernels.xielu(x, alpha, alpha, 0.0).double(), exact, atol=0.0, rtol=1e-6
    )


def test_the_tail_of_gelu(path: str, kernels: Any) -> None:
    """Far below zero, where a distribution function made by subtraction has no digits left, GELU has all of its own."""
    x = torch.linspace(-13, 10, 400001)
    exact = x.double() * torch.special.erfc(x.double() * -(0.5**0.5)) / 2
    got = kernels.gelu(x)
    torch.testing.assert_close(got.double(), exact, atol=0.0, rtol=2e-6)
    assert (got[x < 0] < 0).all()
    beyond = kernels.gelu(-torch.logspace(1.13, 38, 1000))
    assert ((beyond <= 0) & (beyond > -1e-37)).all()


def test_a_bound_that_is_not_a_number(path: str, kernels: Any) -> None:
    """A bound of scales that is NaN makes them NaN, as the definition's minimum does."""
    x, bound = torch.randn(3, 40), torch.tensor([torch.nan])
    for power_of_two in (False, True):
        expected = functional.quant_fp8_dynamic.native(x, (1, -1), bound, power_of_two)
        got = kernels.quant_fp8_dynamic(x, [1, -1], bound, power_of_two)
        torch.testing.assert_close(got[1], expected[1], equal_nan=True)
        assert got[0].float().isnan().equal(expected[0].float().isnan())
        assert got[0].float().isnan().all() == (not power_of_two)


def test_rounding_to_bfloat16(path: str, kernels: Any) -> None:
    """Every rounding to bfloat16, in vectors and in the rest of a row, is torch's: to nearest, ties to even.

    The CPU's own conversion makes zero of what is below the smallest normal number.
    """
    bits = torch.randint(-(2**31), 2**31 - 1, (3, 16389), dtype=torch.int64).to(torch.int32)
    bits[:, ::7] = (bits[:, ::7] >> 16 << 16) + 0x8000  # ties
    x = bits.view(torch.float32).nan_to_num(nan=0.0, posinf=1.0, neginf=1.0).clamp(-1e38, 1e38)
    upper = x.bfloat16()
    lower = (x - upper.float()).bfloat16()
    inexact = upper.float() + lower.float()
    _, total = kernels.fused_add_rms_norm(upper, lower)
    expected = inexact.bfloat16()
    if path in ("amx", "avx512_bf16"):
        expected = expected.where(inexact.abs() >= torch.finfo(torch.bfloat16).tiny, 0.0)
    assert torch.equal(total, expected)


def test_fp8_is_torchs(path: str, kernels: Any) -> None:
    """Every float16 and every tie between float8 values becomes what torch makes of it."""
    halves = torch.arange(2**16).to(torch.int32).to(torch.int16).view(torch.float16)
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (values[1:] + values[:-1]) / 2
    for x in (halves, ties, -ties):
        quantised = kernels.quant_fp8_static(x[None], torch.ones(1), [-1, -1])[0]
        expected = x.float().clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(
            quantised.view(torch.uint8)[~x.isnan()], expected.view(torch.uint8)[~x.isnan()]
        )
        assert quantised.float().isnan().equal(x.isnan())


STREAMED = [
    pytest.param(
        path, dtype, marks=[pytest.mark.slow] * (path != "avx2" and dtype != torch.bfloat16)
    )
    for path in ("amx", "avx512_bf16", "avx512", "avx2", "scalar")
    for dtype in DTYPES
]
"""Paths and dtypes of 32 MiB each: each path and each dtype is in 'make test'."""
streamed = pytest.mark.parametrize(("path", "dtype"), STREAMED, indirect=["path"], ids=str)


@streamed
def test_results_that_no_cache_keeps(path: str, kernels: Any, dtype: torch.dtype) -> None:
    """What is written past the caches, from 32 MiB on, is what small results are, in rows of any length."""
    drawn = draw(2**26 // dtype.itemsize, dtype=dtype)
    for width in (8192, 8191):
        rows = 2**25 // (width * dtype.itemsize) + 2
        x, weight = drawn[: rows * width].view(rows, width), draw(width, dtype=dtype)
        calls = {
            "rms_norm": lambda part, weight=weight: kernels.rms_norm(part, weight),
            "layer_norm": lambda part, weight=weight, width=width: kernels.layer_norm(
                part, [width], weight, weight
            ),
        }
        check_in_parts(x, calls)
    names = ("silu_and_mul", "swigluoai_and_mul", "gelu_and_mul_sparse")
    gates = {
        name: lambda part, name=name: getattr(kernels, name)(part, *GATED[name]) for name in names
    }
    check_in_parts(drawn.view(-1, 8192), gates)


@streamed
def test_memory_of_the_caller_that_no_cache_keeps(
    path: str, kernels: Any, dtype: torch.dtype
) -> None:
    """So are results in memory of the caller, whatever its strides and alignment are, and over what is read."""
    step = 64 // dtype.itemsize
    width = 64 * step + 5  # the rest of a row is less than a vector
    x, weight = (
        draw(2**25 // (width * dtype.itemsize) + 1, width, dtype=dtype),
        draw(width, dtype=dtype),
    )
    expected = torch.cat([kernels.rms_norm(part, weight) for part in x.split(100)])
    for offset in (0, 3):
        memory = torch.full((x.shape[0] * 65 * step + offset,), torch.nan, dtype=dtype)
        wide = memory[offset:].view(x.shape[0], 65 * step)
        out = wide[:, :width]
        kernels.rms_norm_out(x, out, weight)
        assert torch.equal(out, expected)
        assert wide[:, width:].isnan().all()
        out.copy_(x)
        kernels.rms_norm_out(out, out, weight)
        assert torch.equal(out, expected)
    out.copy_(x)
    total = x.clone()
    kernels.fused_add_rms_norm_(out, total, weight)
    normed, summed = kernels.fused_add_rms_norm(x, x, weight)
    assert torch.equal(out, normed)
    assert torch.equal(total, summed)


def check_in_parts(x: Tensor, calls: dict[str, Any]) -> None:
    for name, call in calls.items():
        whole = call(x)
        assert whole.nbytes >= 2**25
        assert torch.equal(whole, torch.cat([call(part) for part in x.split(100)])), name


def test_paths_and_threads_agree(path: str, kernels: Any) -> None:
    """However rows are shared among threads, each comes out the same."""
    x, weight = draw(300, 1021, dtype=torch.float32), draw(1021, dtype=torch.float32)
    tokens, heads, cache = (
        torch.arange(300),
        draw(300, 17 * 60, dtype=torch.float32),
        torch.randn(300, 60),
    )
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(
                (
                    kernels.rms_norm(x, weight),
                    kernels.gelu(x),
                    kernels.quant_fp8_dynamic(x, [-1, -1])[1],
                )
            )
            results[-1] += kernels.mrope(
                tokens.expand(3, -1), heads, heads, 60, cache, [10, 10, 10]
            )
            results[-1] += kernels.dual_chunk_rotary_embedding(
                tokens, heads, heads, 60, cache, 150, 30
            )
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(
            torch.equal(ours, theirs) for ours, theirs in zip(results[0], other, strict=True)
        )


def test_bad_arguments_are_refused(kernels: Any) -> None:
    """The torch ops refuse what they would read or write beyond the end of, by ValueError."""
    x = torch.randn(4, 8)
    with pytest.raises(ValueError, match=r"rms_norm: x has shape .* expected a last dimension of"):
        kernels.rms_norm(x, torch.ones(7))
    with pytest.raises(ValueError, match="variance_size is 9, expected 1 to 8"):
        kernels.rms_norm(x, None, 1e-6, 9)
    with pytest.raises(ValueError, match="residual has shape"):
        kernels.fused_add_rms_norm(x, x[:2])
    with pytest.raises(ValueError, match="expected an even last dimension"):
        kernels.silu_and_mul(x[:, :7])
    with pytest.raises(ValueError, match="positions has 16, expected 0 to 15"):
        kernels.rotary_embedding(torch.tensor([0, 16, 2, 3]), x, x, 8, torch.randn(16, 8))
    with pytest.raises(
        ValueError, match="activation_sparsity is 1, expected a number between 0 and 1"
    ):
        kernels.gelu_and_mul_sparse(x, 1.0)
    with pytest.raises(ValueError, match=r"alpha_n has shape \[2\], expected one element"):
        kernels.xielu(x, torch.ones(1), torch.ones(2))
    with pytest.raises(ValueError, match="scale has shape"):
        kernels.quant_fp8_static(x, torch.ones(3), [1, -1])
    with pytest.raises(TypeError, match="x has dtype Double"):
        kernels.silu(x.double())


def test_gradients_are_refused(kernels: Any) -> None:
    """A kernel without a backward does not drop a gradient silently."""
    x = torch.randn(4, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="no backward"):
        kernels.silu(x)
    with pytest.raises(RuntimeError, match="no backward"):
        kernels.xielu(x.detach(), torch.ones(1), torch.ones(1, requires_grad=True))
    with torch.no_grad():
        assert not kernels.silu(x).requires_grad


def test_writing_is_told_to_autograd(kernels: Any) -> None:
    """A tensor that a kernel writes to counts the write, so that a backward which saved it fails."""
    weight, x = torch.randn(8, requires_grad=True), torch.randn(4, 8)
    product = x * weight
    with torch.no_grad():
        kernels.silu_(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
