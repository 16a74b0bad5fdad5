"""The numbers of the Triton kernels, by Triton's interpreter, which runs on any machine.

It must be asked for before Triton is imported, so these tests run in a process of their own: ``make test-triton``, or
``TRITON_INTERPRET=1 pytest tests/ops/triton/test_interpreted.py``.
"""

from __future__ import annotations

import dataclasses
import math
import os

import pytest
import torch
from opgraft import ops
from opgraft.binding.functional import FUNCTIONALS
from opgraft.ops.on_triton import triton_kernels
from opgraft.ops.spec import OpSpec
from opgraft.testing import checks
from opgraft.testing.catalogue import SPECS
from torch import Tensor

triton = pytest.importorskip(
    "triton", reason="Triton is not installed here; make test-triton runs these tests"
)
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "needs a process with TRITON_INTERPRET=1; make test-triton runs these tests",
        allow_module_level=True,
    )

pytestmark = pytest.mark.usefixtures("exact_arithmetic")

import triton.language as tl  # noqa: E402
from opgraft.ops.activation.triton import tile_at  # noqa: E402
from opgraft.ops.rotary import triton as triton_rotary  # noqa: E402

TRITON = triton_kernels()
CASES = [
    (spec, variant) for name, spec in SPECS.items() if name in TRITON for variant in spec.variants
]
CHUNKS = "dual_chunk_rotary_embedding"
PRECISION = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes from the coarsest to the finest."""
each_case = pytest.mark.parametrize(
    ("spec", "variant"),
    CASES,
    ids=[spec.functional.name + (f"~{variant}" if variant else "") for spec, variant in CASES],
)


@each_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values(spec: OpSpec, variant: str, dtype: torch.dtype) -> None:
    """Each kernel computes what the reference computes in float64: odd widths, several rows, empty."""
    # Element by element the interpreter would take hours for realistic sizes.
    small = dataclasses.replace(spec, large=(), leads=(spec.leads[1], spec.leads[-1]))
    is_brief = dtype != torch.float32
    if is_brief:  # which takes the second of the leads, beside the last, an empty one
        small = dataclasses.replace(small, leads=spec.leads)
        assert 0 not in small.leads[1]
    checks.check_values(small, variant, dtype, TRITON[spec.functional.name], brief=is_brief)


@each_case
def test_strides(spec: OpSpec, variant: str) -> None:
    """Views with gaps between their elements, which hold NaN, give what contiguous tensors give."""
    checks.check_strides(spec, variant, TRITON[spec.functional.name])


@each_case
def test_effects(spec: OpSpec, variant: str) -> None:
    """Only declared arguments are written to, and results are new memory."""
    checks.check_effects(spec, variant, torch.bfloat16, TRITON[spec.functional.name])


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


@pytest.mark.parametrize("method", ["forward_cuda", "forward_xpu"])
@pytest.mark.parametrize(
    "shape", [(6, 48), (6, 3, 16), (2, 3, 48), (2, 3, 3, 16), (6, 2, 48)], ids=str
)
def test_versions_of_a_query(shape: tuple[int, ...], method: str) -> None:
    """A module lays the five versions of a query side by side as the definition does, however heads are arranged."""
    op = ops.DualChunkRotaryEmbedding(
        16, 8, 64, 10000.0, True, torch.float32, chunk_size=12, local_size=3
    )
    positions = torch.tensor([0, 8, 9, 11, 31, 62]).reshape(shape[:2] if shape[:2] == (2, 3) else 6)
    arguments = (
        positions,
        torch.randn(shape),
        torch.randn(6, 16),
        torch.ones(1, dtype=torch.int64),
    )
    for got, expected in zip(
        getattr(op, method)(*arguments), op.forward_native(*arguments), strict=True
    ):
        torch.testing.assert_close(got, expected)


def test_negative_positions_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where values are not checked, the place of a negative position is in the table, as in the definition."""
    monkeypatch.setattr(triton_rotary, "expect_in_range", lambda *arguments: None)
    cache = torch.randn(24, 8)
    got, key = TRITON[CHUNKS](
        torch.tensor([-1, -13]), torch.ones(2, 8), torch.ones(2, 8), 8, cache, 12, 0
    )
    expected = FUNCTIONALS[CHUNKS].native(
        torch.tensor([11, 11]), torch.ones(2, 8), torch.ones(2, 8), 8, cache, 12, 0
    )
    torch.testing.assert_close((got, key), expected)


REFUSED = {
    "cache of integers": (
        "rotary_embedding",
        {"cos_sin_cache": lambda table: table.long()},
        "cos_sin_cache is",
    ),
    "query of integers": (
        "rotary_embedding",
        {"query": Tensor.int, "key": Tensor.int},
        "query is torch.int32",
    ),
    "in place": (
        "rotary_embedding_",
        {"cos_sin_cache": Tensor.int},
        "cos_sin_cache is torch.int32",
    ),
    "axes": ("mrope", {"cos_sin_cache": Tensor.int}, "cos_sin_cache is torch.int32"),
    "chunks": (CHUNKS, {"cos_sin_cache": Tensor.int}, "cos_sin_cache is torch.int32"),
    "short table": (
        CHUNKS,
        {"cos_sin_cache": lambda table: table[:3]},
        "has 3 rows, expected at least",
    ),
    "local size": (CHUNKS, {"local_size": lambda size: -1}, "local_size is -1"),
    "cosines": ("apply_rotary_emb", {"cos": Tensor.int}, "cos is torch.int32"),
    "numbers to quantise": ("quant_fp8_dynamic", {"x": Tensor.int}, "x is torch.int32"),
    "activation": ("gelu_new", {"x": Tensor.int}, "gelu_new: x is torch.int32"),
    "negative limit": ("silu_and_mul_with_clamp", {"limit": lambda limit: -1.0}, "limit is -1.0"),
    "limit that is none": ("swigluoai_and_mul", {"limit": lambda limit: math.nan}, "limit is nan"),
    "step": ("swiglustep_and_mul", {"limit": lambda limit: -0.5}, "limit is -0.5"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    """What the definition refuses the kernel refuses, in the same words."""
    name, changes, said = REFUSED[case]
    spec = SPECS[name]
    arguments = spec.arguments(
        next(iter(spec.variants)), torch.float32, spec.leads[1], max(spec.sizes[:2])
    )
    arguments |= {argument: change(arguments.get(argument)) for argument, change in changes.items()}
    with pytest.raises(ValueError, match=said) as by_definition:
        spec.functional.native(**arguments)
    with pytest.raises(ValueError, match=said) as by_kernel:
        TRITON[name](**arguments)
    assert str(by_kernel.value) == str(by_definition.value)


@pytest.mark.parametrize("powers_of_two", [False, True])
def test_a_bound_that_is_not_a_number(powers_of_two: bool) -> None:
    """A bound of the scale that is NaN shows in the scales, as in the definition, instead of being no bound."""
    x, bound = torch.randn(3, 40), torch.tensor(math.nan)
    q, scale = TRITON["quant_fp8_dynamic"](x, (1, -1), bound, powers_of_two)
    expected, expected_scale = FUNCTIONALS["quant_fp8_dynamic"].native(
        x, (1, -1), bound, powers_of_two
    )
    torch.testing.assert_close(scale, expected_scale, equal_nan=True)
    torch.testing.assert_close(q.float(), expected.float(), equal_nan=True)


WRITTEN = {
    "one tensor": (lambda x: (x, x), False),
    "views of the same": (lambda x: (x[:, :32], x[:, :32]), False),
    "columns that overlap": (lambda x: (x[:, 16:48], x[:, :32]), False),
    "rows that overlap": (lambda x: (x[:3], x[1:4]), False),
    "columns next to each other": (lambda x: (x[:, 32:64], x[:, :32]), True),
    "columns with a gap": (lambda x: (x[:, :16], x[:, 80:]), True),
    "end to end": (lambda x: (x[:3], x[3:]), True),
    "memory of their own": (lambda x: (x, x.clone()), True),
}


@pytest.mark.parametrize("case", WRITTEN)
def test_query_and_key_in_one_memory(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place, nothing is rotated twice: query and key that share elements take the way through new memory."""
    views, in_place = WRITTEN[case]
    ours, exact = torch.randn(6, 96), torch.empty(6, 96)
    exact.copy_(ours)
    (query, key), (expected_query, expected_key) = views(ours), views(exact)
    positions, cache = torch.arange(1, query.shape[0] + 1), torch.randn(7, 16)
    FUNCTIONALS["rotary_embedding_"].native(positions, expected_query, expected_key, 16, cache)
    seen: list[bool] = []
    launch = triton_rotary.launch
    monkeypatch.setattr(
        triton_rotary, "launch", lambda *a, **c: (seen.append(c["in_place"]), launch(*a, **c))
    )
    TRITON["rotary_embedding_"](positions, query, key, 16, cache)
    assert seen == [in_place]
    torch.testing.assert_close((ours, query, key), (exact, expected_query, expected_key))


MIXED = [
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.bfloat16),
]


@pytest.mark.parametrize(("dtype", "weight_dtype"), MIXED, ids=str)
@pytest.mark.parametrize(
    "form", ["rms_norm", "fused_add_rms_norm", "gemma_rms_norm", "rms_norm_gated", "layer_norm"]
)
def test_weights_of_another_dtype(form: str, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    """A norm rounds where its definition does: to the dtype of the weight in ``rms_norm`` only; what one refuses,
    the other does."""
    x, weight = torch.randn(4, 96).to(dtype), torch.randn(96).to(weight_dtype)
    first = (
        (x, x.flip(0)) if form.startswith("fused") else (x, (96,)) if form == "layer_norm" else (x,)
    )
    if form == "layer_norm" and weight_dtype != torch.float32:
        for norm in (FUNCTIONALS[form].native, TRITON[form]):
            with pytest.raises(ValueError, match="layer_norm: weight is"):
                norm(*first, weight)
        return
    got, expected = (
        checks.tensors(norm(*first, weight)) for norm in (TRITON[form], FUNCTIONALS[form].native)
    )
    rounded = form.endswith("rms_norm") and "gemma" not in form
    narrowest = min(dtype, weight_dtype, key=PRECISION.index) if rounded else dtype
    for ours, exact in zip(got, expected, strict=True):
        # A value at the edge between two numbers may go to either: one unit in the last place, of few elements.
        torch.testing.assert_close(ours, exact, rtol=2 * torch.finfo(narrowest).eps, atol=1e-6)
        assert (ours != exact).float().mean() < 0.02 or narrowest == torch.float32
    assert not rounded or torch.equal(got[0], got[0].to(weight_dtype).to(dtype))
