"""Drawn inputs: layouts and values, failures as small programs, and what no plugin may replace."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opgraft.binding.functional import Functional
from opgraft.ops.spec import OpSpec
from opgraft.testing import drawn_checks, honesty
from opgraft.testing.catalogue import SPECS
from opgraft.testing.conformance import Conformance, again, alone
from opgraft.testing.departures import departure, expected
from opgraft.testing.examples import LAYOUTS, VALUES, Example, sweep
from support.defective_plugins import BEGINNING, of_gelu
from torch import Tensor

ENCODER = """
from opgraft.ops import MMEncoderAttention
@MMEncoderAttention.register_oot
class Acme(MMEncoderAttention):
    def forward_oot(self, *inputs, **named):
        return self.forward_native(*inputs, **named)
"""

FORGETFUL = (
    "out = gelu(input, approximate=self.approximate)\nif input.numel() >= 300: out[..., -1] = 0"
)


def test_a_failure_is_made_smaller_and_printed_as_a_program(site) -> None:
    """The program makes a small call with the same departure."""
    site.plugin("acme", BEGINNING + of_gelu(FORGETFUL))
    with alone("acme"):
        conformance = Conformance("acme")
        (case,) = (case for case in conformance.cases if str(case) == "gelu-inputs-float32")
        reason = conformance.judge(case).reason
    program = reason.partition("To see that again: ")[2]
    call = program.partition("print(")[2].removesuffix(")")
    found = eval(call, {"again": again, "Example": Example, "torch": torch})  # noqa: S307
    assert "1 of 300 numbers are off: at [0, 299]" in found
    assert "layout" not in call


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_holds_the_values(layout: str) -> None:
    """Memory of each layout has the shape of the values; only one layout is plain memory."""
    values = torch.randn(1, 3, 5).expand(4, 3, 5)
    placed = LAYOUTS[layout](values)
    if layout != "broadcast":
        placed.copy_(values)
    assert torch.equal(placed, values)
    is_plain = placed.is_contiguous() and not placed.storage_offset()
    assert is_plain is (layout == "packed")


def test_values_are_of_all_magnitudes() -> None:
    """Rows of zeros, small and large rows take turns."""
    rows = VALUES["rows of all sizes"](torch.ones(5, 2, dtype=torch.float64))
    assert rows[:, 0].tolist() == [0.0, 1e-3, 300.0, 1e-6, 1.0]


@pytest.mark.parametrize("form", ["rms_norm", "layer_norm", "grouped_topk", "quant_fp8_dynamic"])
def test_the_native_definition_departs_from_itself_nowhere(form: str) -> None:
    """No drawn input asks for more than the native definition gives in the same dtype."""
    spec = SPECS[form]
    taken = 0
    told = []
    for variant in spec.variants:
        for example in sweep(spec, variant, spec.dtypes[-1]):
            wanted = expected(spec, example, 1 << 14)
            if wanted is not None:
                taken += 1
                told.append(departure(example, spec.functional.native, wanted))
    assert set(told) == {""}
    assert taken > 20


def attended(query: Tensor, key: Tensor, value: Tensor, factor: float = 1.0) -> Tensor:
    """Attention whose products are summed from the last one on."""
    keys, values = (each.repeat_interleave(2, 1) for each in (key, value))
    scores = (query.flip(-1) @ keys.flip(-1).mT) * (factor * query.shape[-1] ** -0.5)
    return torch.softmax(scores, -1) @ values


def test_roundings_of_a_long_sum_are_no_fault() -> None:
    """Where all products of a sum have one sign, another order of the sum is as good as torch's."""
    spec = SPECS["scaled_dot_product_attention"]

    def departures_by(factor: float, values: str) -> set[str]:
        def call(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
            return attended(query, key, value, factor)

        told = set()
        for seed in range(20):
            example = Example("", torch.float32, (9, 1), 65, values=values, seed=seed)
            wanted = expected(spec, example)
            assert wanted is not None
            told.add(departure(example, call, wanted))
        return told

    def by_a_view(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        groups = query.shape[-3] // key.shape[-3]
        grouped = query.unflatten(-3, (-1, groups))
        scores = grouped @ key.unsqueeze(-3).mT / math.sqrt(query.shape[-1])
        return (torch.softmax(scores, -1) @ value.unsqueeze(-3)).flatten(-4, -3)

    assert departures_by(1.0, "far from zero") == {""}
    # One in thousands of sums of 125 products is off by more than its numbers' roundings.
    for seed in (3, 9):
        example = Example("", torch.float32, (19, 15), 125, values="far from zero", seed=seed)
        wanted = expected(spec, example)
        assert wanted is not None
        assert departure(example, by_a_view, wanted) == ""
    assert departures_by(1.0, "usual") == {""}
    assert "" not in departures_by(1.001, "usual")


def gelu_with(native: Callable[..., Any]) -> OpSpec:
    """Return the spec of GELU with another native definition."""
    functional = Functional(native, "gelu", native, (), None, differentiable=False)
    return dataclasses.replace(SPECS["gelu"], functional=functional)


def departs(spec: OpSpec, call: Callable[..., Any], rows: int, size: int = 64) -> str:
    """Return how a call departs for some rows of elements."""
    example = Example(next(iter(spec.variants)), torch.float32, (rows,), size)
    wanted = expected(spec, example)
    assert wanted is not None
    return departure(example, call, wanted)


def test_few_codes_may_differ_by_a_step() -> None:
    """A code may be off by one step, not by two; and not many of many codes in 32 rows or more."""

    def codes(x: Tensor, approximate: str = "none") -> Tensor:
        return (x * 16).round().to(torch.int8)

    def first_by(steps: int, count: int = 1) -> Callable[..., Tensor]:
        def call(**arguments: Any) -> Tensor:
            out = codes(**arguments)
            out.view(-1)[:count] += steps
            return out

        return call

    spec = gelu_with(codes)
    assert departs(spec, first_by(1), 1) == ""
    assert departs(spec, first_by(2), 1) == "1 of 64 integers are others"
    assert departs(spec, first_by(1, 100), 40) == ""
    assert departs(spec, first_by(1, 640), 40) == "25% of all codes are others"
    # All codes of a row move if its scale is rounded the other way.
    assert departs(spec, first_by(1, 4 * 2048), 31, 2048) == ""
    assert departs(spec, first_by(1, 4 * 2048), 32, 2048) == "12% of all codes are others"


def test_scales_that_are_powers_of_two_do_not_move() -> None:
    """A reference tells MXFP4 by such scales, and would read the codes in another order otherwise."""
    example = Example(
        "MXFP4 of gpt-oss", torch.float32, (9,), 9, values="rows of all sizes", seed=1
    )
    wanted = expected(SPECS["quantized_experts"], example)
    assert wanted is not None
    (moved,) = wanted.moved
    assert 0 < moved.max() < 1e-3 * wanted.exact[0].abs().max()


OFF_AT_ONCE = """
out = gelu(input, approximate=self.approximate)
if {dtype} and not input.is_contiguous() and input.shape[-1] > 64: out = out * 1.5
"""
"""Every layout of the sweep has short rows, and every long row of it is packed."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_error_of_two_corners_at_once_is_found(
    site, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only random inputs meet both corners. Without hypothesis, the answer says what to install."""
    # Beside other work, the kit would draw fewer inputs.
    monkeypatch.setattr(drawn_checks, "PATIENCE", 120.0)
    body = OFF_AT_ONCE.format(dtype=f"input.dtype == torch.{dtype}")
    site.plugin("acme", BEGINNING + of_gelu(body))
    with alone("acme"):
        conformance = Conformance("acme")
        (case,) = (case for case in conformance.cases if str(case) == f"gelu-inputs-{dtype}")
        found = conformance.judge(case)
        # As where it is not installed: then the import system finds no such module.
        monkeypatch.setitem(sys.modules, "hypothesis", None)
        not_drawn = conformance.judge(case)
    assert found.status == "failed"
    assert "numbers are off" in found.reason
    assert "layout=" in found.reason
    told = ("passed", "no random inputs: pip install hypothesis")
    assert (not_drawn.status, not_drawn.reason) == told


def test_the_short_form_draws_nothing_at_random(site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then no package is missing."""
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    site.plugin("acme", BEGINNING + of_gelu("out = gelu(input, approximate=self.approximate)"))
    with alone("acme"):
        conformance = Conformance("acme", brief=True)
        (case,) = (case for case in conformance.cases if str(case) == "gelu-inputs-float32")
        outcome = conformance.judge(case)
    assert (outcome.status, outcome.reason) == ("passed", "")


LARGE_ONES_ONLY = """
if input.numel() < 100_000:
    return self.forward_native(input)
out = gelu(input, approximate=self.approximate)
"""


def test_a_kernel_for_large_inputs_is_honest(site) -> None:
    """The short form accuses no kernel that leaves small inputs to the native definition."""
    site.plugin("acme", BEGINNING + of_gelu(LARGE_ONES_ONLY))
    with alone("acme"):
        conformance = Conformance("acme", brief=True)
        (case,) = (case for case in conformance.cases if str(case) == "gelu-honesty")
        outcome = conformance.judge(case)
    assert (outcome.status, outcome.reason) == ("passed", "")


def test_no_switch_is_asked_for_an_op_without_one(site) -> None:
    """``custom_ops`` does not switch every op, and no kernel is to blame."""
    site.plugin("acme", BEGINNING + ENCODER)
    with alone("acme"):
        conformance = Conformance("acme")
        name = "mm_encoder_attn-switching"
        (case,) = (case for case in conformance.cases if str(case) == name)
        outcome = conformance.judge(case)
    assert (outcome.status, outcome.reason) == ("skipped", "custom_ops does not switch this op")


def test_what_a_plugin_replaces_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock and a comparison of another function are told by name."""
    assert honesty.replaced() == []
    monkeypatch.setattr(time, "perf_counter", time.monotonic)
    monkeypatch.setattr(torch, "equal", torch.allclose)
    told = [words.partition(" ")[0] for words in honesty.replaced()]
    assert told == ["time.perf_counter", "torch.equal"]
