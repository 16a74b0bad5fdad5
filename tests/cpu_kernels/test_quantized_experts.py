"""Experts with quantized weights, on every path of this CPU."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import opgraft
import pytest
import torch
from opgraft import functional
from opgraft.binding.functional import binding_of
from opgraft.ops.linear.quantized.storage import packed_size
from opgraft.ops.moe.quantized import spec as quantized_moe
from opgraft.ops.quantization.fp4 import MX_GROUP
from opgraft.ops.spec import OpSpec
from opgraft.testing import checks
from opgraft.testing.catalogue import SPECS
from ops.test_quantized_experts import CASES, given
from torch import Tensor

SPEC = SPECS["quantized_experts"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
EXPERTS = 5
FLOATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LARGEST = {
    "int8": 127,
    "int8 offsets": 127,
    "int4": 8,
    "int4 offsets": 15,
    "e4m3": 200,
    "e5m2": 200,
    "mxfp4": 6,
}
"""How far the codes of each format reach, about."""
pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no g++ to build the kernels with")
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture
def run(kernels: Any) -> Any:
    """The form as the plugin computes it."""
    from opgraft_cpu_kernels.quantized_experts import quantized_experts

    return quantized_experts


@pytest.fixture
def without_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """The native definition is out of reach."""

    def absent(*given: Any, **named: Any) -> Tensor:
        raise AssertionError("the native definition runs")

    monkeypatch.setattr(functional.quantized_experts, "native", absent)


def storage(
    rows: int, width: int, kind: str, dtype: torch.dtype, group: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes, scales and offsets of all experts, the bits that fill up a row drawn as well."""
    scales = (torch.rand(EXPERTS, rows, max(1, width // group)) + 0.5) / (
        LARGEST[kind] * width**0.5
    )
    if kind == "mxfp4":
        exponents = torch.randint(121, 124, (EXPERTS, rows, -(-width // MX_GROUP)))
        codes = torch.randint(256, (EXPERTS, rows, -(-width // MX_GROUP) * MX_GROUP // 2))
        return codes.to(torch.uint8), exponents.to(torch.uint8).view(torch.float8_e8m0fnu), None
    if kind in FLOATS:
        return torch.randn(EXPERTS, rows, width).mul(60).to(FLOATS[kind]), scales.to(dtype), None
    if kind.startswith("int4"):
        codes = torch.randint(256, (EXPERTS, rows, packed_size(width))).to(torch.uint8)
    else:
        codes = torch.randint(-127, 128, (EXPERTS, rows, width)).to(torch.int8)
    offsets = (
        (torch.randn(scales.shape) / (4 * width**0.5)).to(dtype)
        if kind.endswith("offsets")
        else None
    )
    return codes, scales.to(dtype), offsets


def arguments(
    kind: str, tokens: int, dtype: torch.dtype, sizes: tuple[int, int, int]
) -> dict[str, Any]:
    """Realistic ones; some choices are experts elsewhere, and one expert has no token."""
    hidden, intermediate, group = sizes
    w13, w13_scales, w13_offsets = storage(2 * intermediate, hidden, kind, dtype, group)
    w2, w2_scales, w2_offsets = storage(hidden, intermediate, kind, dtype, group)
    return {
        "x": torch.randn(tokens, hidden).to(dtype),
        "w13": w13,
        "w13_scales": w13_scales,
        "w2": w2,
        "w2_scales": w2_scales,
        "topk_weights": torch.rand(tokens, 2).to(dtype),
        "topk_ids": torch.randint(-1, EXPERTS - 1, (tokens, 2)),
        "w13_offsets": w13_offsets,
        "w2_offsets": w2_offsets,
        "w13_bias": torch.randn(EXPERTS, 2 * intermediate).to(dtype),
        "w2_bias": torch.randn(EXPERTS, hidden).to(dtype),
    }


def wide(named: dict[str, Any]) -> dict[str, Any]:
    """The same arguments in float64."""
    return {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in named.items()
    }


@each_dtype
@pytest.mark.parametrize("variant", list(SPEC.variants))
def test_values(
    run: Any, sized: Callable[[OpSpec], OpSpec], variant: str, dtype: torch.dtype
) -> None:
    """On each path, of every format, the reference's results in float64 come out."""
    with torch.no_grad():
        checks.check_values(sized(SPEC), variant, dtype, run)


@each_dtype
@pytest.mark.parametrize("kind", list(LARGEST))
def test_codes_as_they_are(
    run: Any, path: str, without_definition: None, kind: str, dtype: torch.dtype
) -> None:
    """Codes of any format, in groups and in rows of odd sizes, never become plain weights of opgraft's own."""
    torch.manual_seed(0)
    for sizes in ((128, 64, 32), (83, 45, 83)):
        for tokens, activation in (
            (0, "silu"),
            (1, "silu"),
            (1, "swigluoai"),
            (7, "gelu"),
            (70, "swigluoai"),
        ):
            named = arguments(kind, tokens, dtype, sizes)
            got = run(**named, activation=activation)
            exact = quantized_moe._reference_experts(**wide(named), activation=activation)
            assert got.dtype is dtype
            assert got.shape == exact.shape
            if tokens:
                assert (got.double() - exact).abs().max() <= TOLERANCE[
                    dtype
                ] * exact.abs().max().clamp(min=1)


@pytest.mark.parametrize("kind", [*FLOATS, "mxfp4"])
def test_not_a_number(run: Any, path: str, without_definition: None, kind: str) -> None:
    """A code or a scale that is none reaches the tokens of its expert, and no others."""
    named = arguments(kind, 8, torch.float32, (128, 64, 32))
    named["topk_ids"] = torch.arange(8).unsqueeze(1).expand(8, 2) % 4
    of = named["w2_scales"] if kind == "mxfp4" else named["w2"]
    of.view(torch.uint8)[1, 3, 0] = 255
    got = run(**named)
    assert got.isnan().nonzero().tolist() == [[1, 3], [5, 3]]


@pytest.mark.parametrize("wanted", ["x", "w13_scales", "topk_weights", "w2_bias"])
def test_gradients(kernels: Any, wanted: str) -> None:
    """The kernel refuses what wants a gradient, of which it has none."""
    named = arguments("int8", 3, torch.float32, (128, 64, 32))
    named[wanted].requires_grad_()
    with pytest.raises(RuntimeError, match=r"^quantized_experts: this kernel has no backward"):
        kernels.quantized_experts(**named)


@pytest.mark.parametrize(("others", "words"), CASES)
def test_bad_input(run: Any, others: dict[str, Any], words: str) -> None:
    """The error is that of the native definition."""
    with pytest.raises(ValueError, match=f"^quantized_experts: .*{words}"):
        run(**given(**others))


def test_the_form_has_the_kernel(plugin: Any) -> None:
    """Where the plugin is installed, the form runs it."""
    opgraft.load_plugins()
    owner = binding_of(functional.quantized_experts).kernel.winner.owner
    assert owner.__module__ == "opgraft_cpu_kernels.ops"
