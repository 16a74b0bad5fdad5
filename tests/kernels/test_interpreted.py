"""The numbers of the Triton kernels, by Triton's interpreter, which runs on any machine.

It must be asked for before Triton is imported, so these tests run in a process of their own: ``make test-triton``, or
``TRITON_INTERPRET=1 pytest tests/kernels/test_interpreted.py``.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from opgraft.kernels.on_triton import TRITON
from opgraft.specs import checks
from opgraft.specs.catalogue import SPECS
from opgraft.specs.spec import OpSpec

triton = pytest.importorskip("triton", reason="Triton is not installed here; make test-triton runs these tests")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a process with TRITON_INTERPRET=1; make test-triton runs these tests", allow_module_level=True)

import numpy as np  # noqa: E402  # Triton's interpreter needs it, opgraft does not
import triton.language as tl  # noqa: E402
from opgraft.kernels.triton_activation import tile_at  # noqa: E402

CASES = [(spec, variant) for name, spec in SPECS.items() if name in TRITON for variant in spec.variants]
NAMES = {
    "fp32": (torch.float32, torch.uint32),
    "bf16": (torch.bfloat16, torch.uint16),
    "fp16": (torch.float16, torch.uint16),
    "fp8e4nv": (torch.float8_e4m3fn, torch.uint8),
    "fp8e5": (torch.float8_e5m2, torch.uint8),
}
"""Triton's names of dtypes: torch's, and the integers of that size, as which the interpreter keeps some of them."""

each_case = pytest.mark.parametrize(
    ("spec", "variant"), CASES, ids=[spec.form.name + (f"~{variant}" if variant else "") for spec, variant in CASES]
)


@pytest.fixture(autouse=True)
def exact_conversions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Conversions as the hardware rounds: the interpreter's own truncates to bf16 and drops carries of the mantissa."""
    from triton.runtime import interpreter

    def convert(values: Any, taken: Any, made: Any, rounding: object) -> Any:
        (source, bits), (target, target_bits) = NAMES[taken.name], NAMES[made.name]
        given = torch.from_numpy(np.ascontiguousarray(values).reshape(-1).view(np.uint8).copy())
        return given.view(bits).view(source).to(target).view(target_bits).numpy().reshape(values.shape)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
    with warnings.catch_warnings():
        # numpy warns of what floating-point arithmetic does on purpose: exp overflows to infinity, 0 / 0 is NaN.
        warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter")
        yield


@each_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values(spec: OpSpec, variant: str, dtype: torch.dtype) -> None:
    """Each kernel computes what the reference computes in float64: odd widths, several rows, empty."""
    # Element by element the interpreter would take hours for realistic sizes.
    small = dataclasses.replace(spec, large=(), leads=(spec.leads[1], spec.leads[-1]))
    checks.check_values(small, variant, dtype, TRITON[spec.form.name], brief=dtype != torch.float32)


@each_case
def test_strides(spec: OpSpec, variant: str) -> None:
    """Views with gaps between their elements, which hold NaN, give what contiguous tensors give."""
    checks.check_strides(spec, variant, TRITON[spec.form.name])


@each_case
def test_effects(spec: OpSpec, variant: str) -> None:
    """Only declared arguments are written to, and results are new memory."""
    checks.check_effects(spec, variant, torch.bfloat16, TRITON[spec.form.name])


def test_softplus_of_very_negative_parameters() -> None:
    """``softplus`` keeps the small values that 1 + exp(t) would round away: xIELU with parameters far below zero."""
    x = torch.linspace(1.0, 3.0, 33)
    for alpha in (-30.0, -17.0, -9.0, 0.5, 25.0):
        parameter = torch.tensor(alpha)
        got = TRITON["xielu"](x, parameter, parameter, beta=0.0)
        expected = torch.nn.functional.softplus(parameter.double()) * x.double() ** 2
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def columns_of_tile(out, index, width, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column, inside = tile_at(index, 1, width, 1, tile)
    tl.store(out + tl.arange(0, tile)[None, :], tl.where(inside, column + row, -1))


@pytest.mark.parametrize("width", [2**31 - 1, 2**31 - 2047, 2**31 - 2048])
def test_tiles_of_widths_near_the_last_of_32_bits(width: int) -> None:
    """The first tile starts at the first column, the last ends at the last, and no other column passes the mask."""
    blocks = -(-width // 2048)
    for index in (0, blocks - 1):
        out = torch.zeros(2048, dtype=torch.int64)
        columns_of_tile[(1,)](out, index, width, 2048)
        start = index * 2048
        expected = [column if column < width else -1 for column in range(start, start + 2048)]
        assert out.tolist() == expected


def test_rows_that_share_memory() -> None:
    """What is written in place must not share elements: the call raises as torch does, and nothing is written."""
    x = torch.randn(1, 8).expand(3, 8)
    before = x.clone()
    with pytest.raises(RuntimeError, match="more than one element"):
        TRITON["silu_"](x)
    assert torch.equal(x, before)
