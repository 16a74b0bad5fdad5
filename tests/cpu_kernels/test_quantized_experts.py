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
from opgraft.ops.quantized_linear.quantizers import quantize_int4, quantize_int8
from opgraft.ops.quantized_moe import spec as quantized_moe
from opgraft.ops.spec import OpSpec
from opgraft.testing import checks
from opgraft.testing.catalogue import SPECS
from ops.test_quantized_experts import CASES, given
from torch import Tensor

SPEC = SPECS["quantized_experts"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
EXPERTS, HIDDEN, INTERMEDIATE = 5, 128, 64
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


def storage(rows: int, width: int, kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes, scales and offsets of all experts."""
    weights = torch.randn(EXPERTS, rows, width) / width**0.5
    if kind == "int8":
        made: list[Any] = [(*quantize_int8(weight, 32), None) for weight in weights]
    else:
        made = [quantize_int4(weight, 32, symmetric=kind == "symmetric") for weight in weights]
    codes, scales, offsets = (None if parts[0] is None else torch.stack(parts) for parts in zip(*made, strict=True))
    assert codes is not None
    assert scales is not None
    return codes, scales.to(dtype), None if offsets is None else offsets.to(dtype)


def arguments(kind: str, tokens: int, dtype: torch.dtype) -> dict[str, Any]:
    """Realistic ones; some choices are experts elsewhere, and one expert has no token."""
    w13, w13_scales, w13_offsets = storage(2 * INTERMEDIATE, HIDDEN, kind, dtype)
    w2, w2_scales, w2_offsets = storage(HIDDEN, INTERMEDIATE, kind, dtype)
    return {
        "x": torch.randn(tokens, HIDDEN).to(dtype),
        "w13": w13,
        "w13_scales": w13_scales,
        "w2": w2,
        "w2_scales": w2_scales,
        "topk_weights": torch.rand(tokens, 2).to(dtype),
        "topk_ids": torch.randint(-1, EXPERTS - 1, (tokens, 2)),
        "w13_offsets": w13_offsets,
        "w2_offsets": w2_offsets,
        "w13_bias": torch.randn(EXPERTS, 2 * INTERMEDIATE).to(dtype),
        "w2_bias": torch.randn(EXPERTS, HIDDEN).to(dtype),
    }


@each_dtype
@pytest.mark.parametrize("variant", list(SPEC.variants))
def test_values(run: Any, sized: Callable[[OpSpec], OpSpec], variant: str, dtype: torch.dtype) -> None:
    """On each path, of every format, the reference's results in float64 come out."""
    with torch.no_grad():
        checks.check_values(sized(SPEC), variant, dtype, run)


@each_dtype
@pytest.mark.parametrize("kind", ["int8", "symmetric", "offsets"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "swigluoai"])
def test_codes_as_they_are(
    run: Any, path: str, without_definition: None, kind: str, activation: str, dtype: torch.dtype
) -> None:
    """Integers of 4 and 8 bits never become plain weights of opgraft's own, for a token as for many."""
    torch.manual_seed(0)
    for tokens in (0, 1, 7, 70):
        named = arguments(kind, tokens, dtype)
        got = run(**named, activation=activation)
        wide = {
            name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
            for name, value in named.items()
        }
        exact = quantized_moe._reference(**wide, activation=activation)
        assert got.dtype is dtype
        assert got.shape == exact.shape
        if tokens:
            assert (got.double() - exact).abs().max() <= TOLERANCE[dtype] * exact.abs().max().clamp(min=1)


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
