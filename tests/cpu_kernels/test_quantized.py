"""Linear layers with quantized weights, on every path of this CPU."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opgraft import functional, ops
from opgraft.ops.linear.quantized.quantizers import quantize_int4, quantize_int8
from opgraft.ops.linear.quantized.storage import dequantize
from opgraft.ops.spec import OpSpec
from opgraft.testing import checks
from opgraft.testing.catalogue import SPECS
from torch import Tensor

FORMS = ("quantized_linear", "int8_dynamic_linear")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no g++ to build the kernels with")
each_form = pytest.mark.parametrize(
    ("form", "variant"), [(name, variant) for name in FORMS for variant in SPECS[name].variants]
)


def kernel(form: str) -> Any:
    from opgraft_cpu_kernels import quantized

    return getattr(quantized, form)


def called(*run: Any) -> set[str]:
    """The ops of the plugin that run when the first argument is called on the others."""
    with torch.no_grad(), torch.profiler.profile() as profile:
        run[0](*run[1:])
    names = {event.key for event in profile.key_averages()}
    return {name.split("::")[1] for name in names if name.startswith("opgraft_cpu_kernels::")}


def quantized(
    features: int, width: int, group: int | None, kind: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    weight = torch.randn(features, width) / width**0.5
    if kind == "int8":
        return *quantize_int8(weight, group), None
    return quantize_int4(weight, group, symmetric=kind == "symmetric")


def assert_near(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Errors are small against the largest result: sums of many terms may cancel."""
    assert got.dtype == dtype
    assert got.shape == expected.shape
    if expected.numel():
        bound = TOLERANCE[dtype] * expected.abs().max().clamp(min=1)
        assert (got.double() - expected).abs().max() <= bound


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_form
def test_values(
    form: str, variant: str, dtype: torch.dtype, sized: Callable[[OpSpec], OpSpec]
) -> None:
    """On each path a kernel computes what the reference computes in float64."""
    with torch.no_grad():
        checks.check_values(sized(SPECS[form]), variant, dtype, kernel(form))


@each_form
def test_strides(form: str, variant: str, path: str) -> None:
    """Inputs, scales and biases may lie in memory as they like."""
    with torch.no_grad():
        checks.check_strides(SPECS[form], variant, kernel(form))


@pytest.mark.parametrize("kind", ["int8", "symmetric", "offsets"])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9, 33])
def test_sizes(kernels: Any, path: str, rows: int, kind: str) -> None:
    """Groups of any multiple of 16, rows that end within a block, any number of outputs: all come out right."""
    for width, group in (
        (16, 16),
        (48, 16),
        (160, 32),
        (192, 96),
        (384, 192),
        (576, 64),
        (256, 128),
        (64, None),
        (769, None),
    ):
        if group == 16 < width and kind != "int8":
            continue  # which the native definition computes
        for features in (1, 3, 4, 33):
            codes, scales, offsets = quantized(features, width, group, kind)
            x, bias = torch.randn(rows, width), torch.randn(features)
            got = kernels.quantized_linear(x, codes, scales, offsets, bias)
            exact = x.double() @ dequantize(codes, scales, offsets, width, torch.float64).T + bias
            assert_near(got, exact, torch.float32)


@pytest.mark.parametrize("scale_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 20])
def test_dtypes_mix(
    kernels: Any, path: str, dtype: torch.dtype, scale_dtype: torch.dtype, rows: int
) -> None:
    """Scales may have another dtype than inputs have, by groups with offsets as well as one for each row."""
    codes, scales, _ = quantized(9, 320, None, "int8")
    scales, x = scales.to(scale_dtype), torch.randn(rows, 320).to(dtype)
    exact = x.double() @ dequantize(codes, scales, None, 320, torch.float64).T
    assert_near(kernels.quantized_linear(x, codes, scales), exact, dtype)
    codes, scales, offsets = quantized(9, 320, 32, "offsets")
    assert offsets is not None
    scales, offsets, x = (
        scales.to(scale_dtype),
        offsets.to(scale_dtype),
        torch.randn(rows, 320).to(dtype),
    )
    exact = x.double() @ dequantize(codes, scales, offsets, 320, torch.float64).T
    assert_near(kernels.quantized_linear(x, codes, scales, offsets), exact, dtype)


@pytest.mark.parametrize("rows", [1, 4, 5, 70])
@pytest.mark.parametrize("width", [1, 31, 64, 65, 4200])
def test_integers(kernels: Any, path: str, rows: int, width: int) -> None:
    """Products of 8-bit codes are summed exactly, the largest too, for any number of inputs and outputs."""
    for features in (1, 3, 4, 67):
        weight = torch.randint(-128, 128, (features, width), dtype=torch.int8)
        x = torch.randint(-127, 128, (rows, width)).float()
        x[:, 0] = 127  # so that the scale of each row is one
        x[-1], weight[-1] = 127, -128
        got = kernels.int8_dynamic_linear(x, weight, torch.ones(features))
        assert torch.equal(got.double(), (x.double() @ weight.double().T).float().double())


def test_what_is_no_number(kernels: Any, path: str) -> None:
    """A row with an infinity or a NaN becomes NaN, and no other does."""
    weight, scales = torch.randint(-127, 128, (6, 70), dtype=torch.int8), torch.rand(6)
    for value in (torch.inf, -torch.inf, torch.nan):
        x = torch.randn(3, 70)
        x[1, 3] = value
        for run in (kernels.int8_dynamic_linear, functional.int8_dynamic_linear.native):
            assert torch.equal(
                run(x, weight, scales).isnan().all(1), torch.tensor([False, True, False])
            )
    assert torch.equal(
        kernels.int8_dynamic_linear(torch.zeros(2, 70), weight, scales), torch.zeros(2, 6)
    )


def test_empty(kernels: Any) -> None:
    """No rows, or no outputs, give an empty result."""
    codes, scales, offsets = quantized(6, 64, 32, "offsets")
    assert kernels.quantized_linear(torch.ones(2, 0, 64), codes, scales, offsets).shape == (2, 0, 6)
    assert kernels.quantized_linear(torch.ones(2, 64), codes[:0], scales[:0]).shape == (2, 0)
    bytes_, factors, _ = quantized(6, 64, None, "int8")
    assert kernels.int8_dynamic_linear(torch.ones(0, 64), bytes_, factors).shape == (0, 6)
    assert kernels.int8_dynamic_linear(torch.ones(3, 64), bytes_[:0], factors[:0]).shape == (3, 0)


def test_which_kernel_runs(kernels: Any) -> None:
    """Forms and modules run the kernels; the native definition runs for other groups, and for gradients."""
    op = ops.QuantizedLinear(96, 40, bits=4, group_size=32)
    assert called(op, torch.randn(2, 96)) == {"quantized_linear"}
    assert called(functional.quantized_linear, torch.randn(2, 96), op.weight, op.scales) == {
        "quantized_linear"
    }
    assert called(ops.Int8DynamicLinear(96, 40), torch.randn(2, 96)) == {"int8_dynamic_linear"}
    assert called(ops.QuantizedLinear(96, 40, group_size=24), torch.randn(2, 96)) == set()
    x = torch.randn(2, 96, requires_grad=True)
    op(x).sum().backward()
    weight = dequantize(op.weight, op.scales, op.offsets, 96)
    torch.testing.assert_close(x.grad, weight.sum(0).expand(2, 96))


@pytest.mark.parametrize("kind", ["int8", "offsets"])
def test_compilation(kernels: Any, kind: str) -> None:
    """Layers compile whole, with groups that kernels take and with others."""
    for group in (32, 24):
        codes, scales, offsets = quantized(7, 96, group, kind)
        for rows in (1, 40):
            x = torch.randn(rows, 96)
            compiled = torch.compile(
                functional.quantized_linear, fullgraph=True, backend="aot_eager"
            )
            expected = functional.quantized_linear.native(x, codes, scales, offsets)
            torch.testing.assert_close(
                compiled(x, codes, scales, offsets), expected, atol=1e-5, rtol=1e-5
            )


def test_threads(kernels: Any) -> None:
    """However outputs are shared among threads, results are the same."""
    threads = torch.get_num_threads()
    codes, scales, offsets = quantized(500, 512, 64, "offsets")
    bytes_, factors, _ = quantized(500, 512, None, "int8")
    for rows in (1, 7, 40):
        x, results = torch.randn(rows, 512), []
        try:
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                pair = (
                    kernels.quantized_linear(x, codes, scales, offsets),
                    kernels.int8_dynamic_linear(x, bytes_, factors),
                )
                results.append(pair)
        finally:
            torch.set_num_threads(threads)
        for other in results[1:]:
            assert torch.equal(other[1], results[0][1])
            if rows <= 8:  # more are multiplied by torch
                assert torch.equal(other[0], results[0][0])


def test_autocast(kernels: Any) -> None:
    """Autocast changes nothing: results have the dtype of the input."""
    codes, scales, offsets = quantized(12, 64, 32, "offsets")
    for rows in (2, 40):
        x = torch.randn(rows, 64)
        plain = kernels.quantized_linear(x, codes, scales, offsets)
        with torch.autocast("cpu"):
            assert torch.equal(kernels.quantized_linear(x, codes, scales, offsets), plain)


def test_bad_arguments(kernels: Any) -> None:
    """The ops refuse what does not fit before they read it."""
    codes, scales, offsets = quantized(12, 64, 32, "offsets")
    x = torch.randn(3, 64)
    for arguments in (
        (torch.randn(3, 200), codes, scales),
        (x, codes, scales[:4]),
        (x, codes, scales, scales[:, :1]),
        (x, codes, scales, offsets, torch.ones(3)),
        (x, codes.float(), scales),
        (x, codes, scales.repeat(1, 4)),
    ):
        with pytest.raises(ValueError, match="quantized_linear: "):
            kernels.quantized_linear(*arguments)
    with pytest.raises(ValueError, match="int8_dynamic_linear: weight has shape"):
        kernels.int8_dynamic_linear(x, codes, scales)
