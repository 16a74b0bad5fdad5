"""What is particular to quantisation: rounding, scales and their layout, numbers that are none."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opgraft import current_platform, functional, maybe_get_oot_by_class
from opgraft.ops import GroupShape, QuantFP8
from opgraft.ops.quantization.functional import FP8_MAX, smallest_scale
from opgraft.ops.quantization.spec import FORMATS, decoded, nearest
from opgraft.testing.catalogue import SPECS
from torch import Tensor

E4M3 = torch.float8_e4m3fn
TENSOR, TOKEN, CHANNEL = GroupShape.PER_TENSOR, GroupShape.PER_TOKEN, GroupShape.PER_CHANNEL
formats = pytest.mark.parametrize("dtype", FORMATS, ids=str)


def bits(q: Tensor) -> Tensor:
    return q.view(torch.uint8)


@formats
def test_the_reference_knows_the_formats(dtype: torch.dtype) -> None:
    """The list of numbers that the reference rounds to is what torch makes of the codes, up to the largest."""
    mantissa_bits, bias, limit = FORMATS[dtype]
    codes = torch.arange(128, dtype=torch.uint8)
    numbers = codes.view(dtype).double()
    finite = numbers.isfinite()
    assert torch.equal(decoded(codes.long(), mantissa_bits, bias)[finite], numbers[finite])
    assert (
        limit
        == FP8_MAX[dtype]
        == (224.0 if dtype == torch.float8_e4m3fnuz else numbers[finite].max())
    )


@formats
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
def test_every_half_number_is_rounded_to_the_nearest(dtype: torch.dtype, half: torch.dtype) -> None:
    """All finite 16-bit numbers round to the nearest, in the middle to the even one, and saturate."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(half)
    x = x[x.isfinite()]
    q = functional.quant_fp8_static(x, torch.ones(1), TENSOR, dtype)
    assert torch.equal(bits(q), bits(nearest(x.double(), dtype)))


@pytest.mark.parametrize("variant", SPECS["quant_fp8_dynamic"].variants)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
def test_fewer_than_two_in_a_thousand_differ(variant: str, dtype: torch.dtype) -> None:
    """Rounding the quotient to float32 first moves next to no value to a neighbour."""
    spec = SPECS["quant_fp8_dynamic"]
    arguments = spec.arguments(variant, dtype, (83,), 5125)
    q, scale = spec.functional.native(**arguments)
    expected, expected_scale = spec.reference(**{**arguments, "x": arguments["x"].double()})
    assert (bits(q) != bits(expected)).double().mean() < 0.002
    torch.testing.assert_close(scale, expected_scale, atol=2e-7, rtol=2e-8)


@pytest.mark.parametrize("shape", [(11,), (5, 11), (2, 3, 11), (0, 11), (4, 0), (2, 0, 11)])
@pytest.mark.parametrize("group_shape", [TENSOR, TOKEN, CHANNEL, GroupShape(1, 4), (1, 11)])
def test_shapes_of_scales(shape: tuple[int, ...], group_shape: tuple[int, int]) -> None:
    """Scales keep the leading dimensions where a token has its own, and what was computed can be given back."""
    x = torch.randn(shape)
    q, scale = functional.quant_fp8_dynamic(x, group_shape)
    *lead, hidden = shape
    expected = {TENSOR: (1,), TOKEN: (*lead, 1), CHANNEL: (1, hidden)}
    assert scale.shape == expected.get(
        GroupShape(*group_shape), (*lead, math.ceil(hidden / group_shape[1]))
    )
    assert (q.shape, q.dtype, scale.dtype) == (x.shape, E4M3, torch.float32)
    assert torch.equal(bits(functional.quant_fp8_static(x, scale, group_shape)), bits(q))


def test_the_last_group_may_be_smaller() -> None:
    """Groups that do not divide a row or a column are cut off at its end."""
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]])
    _, scale = functional.quant_fp8_dynamic(x, (1, 2))
    torch.testing.assert_close(scale, torch.tensor([[2.0, 4.0, 5.0]]) / 448)
    blocks = functional.quant_fp8_static(
        torch.ones(3, 3), torch.tensor([[1.0, 2.0], [4.0, 8.0]]), (2, 2)
    )
    assert torch.equal(
        blocks.float(), torch.tensor([[1.0, 1, 0.5], [1, 1, 0.5], [0.25, 0.25, 0.125]])
    )


@pytest.mark.parametrize(
    ("group_shape", "scale_shape"),
    [
        (TENSOR, ()),
        (TENSOR, (1,)),
        (TENSOR, (1, 1)),
        (TOKEN, (2, 3, 1)),
        (TOKEN, (6, 1)),
        (TOKEN, (6,)),
        (CHANNEL, (1, 8)),
        (CHANNEL, (8,)),
        (GroupShape(1, 4), (2, 3, 2)),
        (GroupShape(1, 4), (6, 2)),
        (GroupShape(4, 4), (2, 2)),
    ],
)
def test_given_scales_may_be_flat(
    group_shape: tuple[int, int], scale_shape: tuple[int, ...]
) -> None:
    """Leading dimensions of scales may be flattened and dimensions of one left out."""
    x = torch.randn(2, 3, 8)
    scale = torch.rand(scale_shape) + 0.5
    q = functional.quant_fp8_static(x, scale, group_shape)
    rows = group_shape[0] if group_shape[0] > 0 else 6
    columns = group_shape[1] if group_shape[1] > 0 else 8
    matrix = scale.reshape(math.ceil(6 / rows), math.ceil(8 / columns))
    spread = matrix.repeat_interleave(rows, 0)[:6].repeat_interleave(columns, 1)[:, :8]
    assert torch.equal(bits(q), bits((x / spread.reshape(2, 3, 8)).to(E4M3)))


@pytest.mark.parametrize("group_shape", [TENSOR, TOKEN, CHANNEL, GroupShape(1, 2)])
def test_zeros(group_shape: GroupShape) -> None:
    """Zeros stay zeros at the smallest scale, which is no zero."""
    q, scale = functional.quant_fp8_dynamic(torch.zeros(3, 4), group_shape)
    assert not q.float().any()
    assert torch.equal(scale, torch.full_like(scale, 1 / (448 * 512)))


def test_what_is_no_number() -> None:
    """A NaN stays where it is and leaves the scale alone; an infinity saturates where the scale does not follow it."""
    x = torch.tensor([[1.0, math.nan, -2.0, 0.5], [math.inf, 1.0, -math.inf, 2.0]])
    q, scale = functional.quant_fp8_dynamic(x, TOKEN)
    torch.testing.assert_close(
        q.float()[0], torch.tensor([224.0, math.nan, -448, 112]), equal_nan=True
    )
    torch.testing.assert_close(
        q.float()[1], torch.tensor([math.nan, 0, math.nan, 0]), equal_nan=True
    )
    torch.testing.assert_close(scale[:, 0], torch.tensor([2 / 448, math.inf]))
    for dtype in FP8_MAX:
        q = functional.quant_fp8_static(x, torch.ones(1), TENSOR, dtype)
        limit = FP8_MAX[dtype]
        expected = torch.tensor([[1.0, math.nan, -2.0, 0.5], [limit, 1.0, -limit, 2.0]])
        torch.testing.assert_close(q.float(), expected, equal_nan=True)
    q, scale = functional.quant_fp8_dynamic(x, TOKEN, torch.tensor(4.0))
    torch.testing.assert_close(q.float()[1], torch.tensor([448.0, 112, -448, 224]))
    torch.testing.assert_close(scale[:, 0], torch.tensor([2 / 448, 4 / 448]))


def test_powers_of_two() -> None:
    """Scales are rounded up to powers of two: those that are one stay, the smallest scale becomes one."""
    exact = torch.tensor([[2.0**k * 448] for k in range(-8, 9)])
    _, scale = functional.quant_fp8_dynamic(exact, TOKEN, use_ue8m0=True)
    assert torch.equal(scale, exact / 448)
    above = torch.nextafter(exact / 448, torch.tensor(math.inf)) * 448
    q, scale = functional.quant_fp8_dynamic(above, TOKEN, use_ue8m0=True)
    assert torch.equal(scale, exact / 448 * 2)
    assert torch.equal(q.float(), torch.full_like(exact, 224))
    _, scale = functional.quant_fp8_dynamic(torch.zeros(1, 4), GroupShape(1, 2), use_ue8m0=True)
    assert torch.equal(scale, torch.full((1, 2), 2.0**-17))
    assert smallest_scale(E4M3) < 2.0**-17


def test_no_gradient() -> None:
    """Quantised values and scales take no part in autograd."""
    x = torch.randn(3, 4, requires_grad=True)
    q, scale = functional.quant_fp8_dynamic(x, TOKEN)
    given = functional.quant_fp8_static(x, scale.requires_grad_(), TOKEN)
    assert not any(tensor.requires_grad for tensor in (q, given))


def test_group_shape() -> None:
    """Group shapes are pairs that know which of the kinds they are."""
    kinds = ("is_per_tensor", "is_per_token", "is_per_channel", "is_per_group")
    rows = [(TENSOR, "is_per_tensor"), (TOKEN, "is_per_token"), (CHANNEL, "is_per_channel")]
    for shape, kind in [*rows, (GroupShape(1, 128), "is_per_group"), (GroupShape(128, 128), "")]:
        assert [name for name in kinds if getattr(shape, name)()] == ([kind] if kind else [])
    assert (TENSOR, TOKEN.row, TOKEN.col) == ((-1, -1), 1, -1)


def test_the_module_gives_back_the_scale_that_it_got() -> None:
    """With static=True the second result is the scale itself, in its shape."""
    x, scale = torch.randn(3, 4), torch.tensor([0.01])
    q, given = QuantFP8(True, TENSOR)(x, scale)
    assert given is scale
    assert torch.equal(bits(q), bits(functional.quant_fp8_static(x, scale, TENSOR)))


@pytest.mark.parametrize(("padding", "rows"), [(None, 5), (0, 5), (3, 5), (17, 17)])
@pytest.mark.parametrize("static", [False, True])
def test_tokens_are_padded(padding: int | None, rows: int, static: bool) -> None:
    """Up to num_token_padding there are rows of zeros behind the tokens; there are no scales for them."""
    x = torch.randn(5, 6)
    scale = (torch.rand(5, 1),) if static else ()
    q, used = QuantFP8(static, TOKEN, num_token_padding=padding)(x, *scale)
    plain, _ = QuantFP8(static, TOKEN)(x, *scale)
    assert (q.shape, used.shape) == ((rows, 6), (5, 1))
    assert torch.equal(bits(q[:5]), bits(plain))
    assert not bits(q[5:]).any()


@pytest.mark.parametrize("shape", [(5, 6), (3, 5, 6)])
@pytest.mark.parametrize(("aligned", "step"), [(False, 5), (True, 8)])
def test_layout_of_group_scales(shape: tuple[int, ...], aligned: bool, step: int) -> None:
    """Column-major scales of neighbouring tokens adjoin; aligned columns start at multiples of 16 bytes."""
    x = torch.randn(shape)
    op = QuantFP8(False, GroupShape(1, 2), column_major_scales=True, tma_aligned_scales=aligned)
    (q, scale), (plain_q, plain) = (
        op(x),
        QuantFP8(False, GroupShape(1, 2), tma_aligned_scales=aligned)(x),
    )
    assert torch.equal(scale, plain)
    assert torch.equal(bits(q), bits(plain_q))
    assert scale.stride()[-2:] == (1, step)
    assert len(shape) == 2 or scale.stride(0) == 3 * step
    assert plain.is_contiguous()


def test_layout_is_for_groups() -> None:
    """Scales of tensor, token and channel, and those of a single token without its dimension, have one layout."""
    for group_shape in (TENSOR, TOKEN, CHANNEL):
        _, scale = QuantFP8(False, group_shape, column_major_scales=True, tma_aligned_scales=True)(
            torch.randn(5, 6)
        )
        assert scale.is_contiguous()
    assert QuantFP8(False, (1, 2), column_major_scales=True)(torch.randn(6))[1].shape == (3,)


def test_dtype_of_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op quantises to the fp8 format of the platform, and to e4m3fn where it names none."""
    assert QuantFP8(False, TOKEN).dtype == current_platform().capability().fp8_dtype == E4M3
    real = current_platform().capability()
    for named, expected in ((torch.float8_e4m3fnuz, torch.float8_e4m3fnuz), (None, E4M3)):
        changed = type(real)(real.name, real.dtypes, named, real.features)
        monkeypatch.setattr(
            type(current_platform()), "capability", lambda self, index=0, c=changed: c
        )
        assert QuantFP8(False, TOKEN).dtype == expected


def test_settings_of_the_module() -> None:
    """The op keeps its settings where kernels read them."""
    op = QuantFP8(False, (1, 128), 16, True, True, True, dtype=torch.float8_e5m2)
    assert (op.static, op.group_shape, op.num_token_padding) == (False, GroupShape(1, 128), 16)
    assert (op.column_major_scales, op.tma_aligned_scales, op.use_ue8m0) == (True, True, True)
    assert (op.is_group_quant, op.use_per_token_if_dynamic, op.dtype) == (
        True,
        False,
        torch.float8_e5m2,
    )
    assert QuantFP8(False, TOKEN).use_ue8m0 is False
    assert "group_shape=(1, 128)" in repr(op)
    assert maybe_get_oot_by_class(QuantFP8) is QuantFP8


X, S = torch.randn(4, 6), torch.ones(1)
static, dynamic = functional.quant_fp8_static, functional.quant_fp8_dynamic
BAD: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: QuantFP8(False, GroupShape(2, 2)),
        r"quant_fp8: group_shape is \(2, 2\), expected \(-1, -1\), \(1, -1\)",
    ),
    (lambda: QuantFP8(False, (-1, 2)), r"quant_fp8: group_shape is \(-1, 2\), expected"),
    (
        lambda: QuantFP8(True, (0, 2)),
        r"quant_fp8: group_shape is \(0, 2\), expected \(rows, columns\), each positive",
    ),
    (
        lambda: QuantFP8(True, (1, 2, 3)),
        r"quant_fp8: group_shape is \(1, 2, 3\), expected \(rows, columns\)",
    ),
    (lambda: QuantFP8(True, TENSOR, -1), "quant_fp8: num_token_padding is -1, expected 0 or more"),
    (
        lambda: QuantFP8(True, TENSOR, dtype=torch.int8),
        "quant_fp8: dtype is torch.int8, expected one of",
    ),
    (
        lambda: QuantFP8(True, TENSOR)(X),
        "quant_fp8: scale is None, expected a tensor with static=True",
    ),
    (
        lambda: QuantFP8(False, TENSOR)(X, S),
        "quant_fp8: scale is given, expected none with static=False",
    ),
    (
        lambda: QuantFP8(True, TOKEN)(X, S, S),
        "quant_fp8: scale_ub is given, expected it with computed scales",
    ),
    (
        lambda: QuantFP8(False, TENSOR)(X, None, S),
        r"scale_ub is given, expected it with .* \(1, -1\) only",
    ),
    (
        lambda: QuantFP8(False, TOKEN)(X, None, torch.ones(2)),
        r"scale_ub has shape \(2,\), expected one element",
    ),
    (
        lambda: QuantFP8(False, TOKEN, 8)(torch.ones(2, 3, 4)),
        r"x has shape \(2, 3, 4\), expected \[tokens, hidden\]",
    ),
    (lambda: dynamic(X.int(), TOKEN), "quant_fp8_dynamic: x is torch.int32, expected one of"),
    (
        lambda: dynamic(X.to(E4M3), TOKEN),
        "quant_fp8_dynamic: x is torch.float8_e4m3fn, expected one of",
    ),
    (
        lambda: dynamic(torch.tensor(1.0), TENSOR),
        r"quant_fp8_dynamic: x has shape \(\), expected \[..., hidden\]",
    ),
    (
        lambda: dynamic(X, TOKEN, dtype=torch.float16),
        "quant_fp8_dynamic: dtype is torch.float16, expected one of",
    ),
    (lambda: dynamic(X, (3, 3)), r"quant_fp8_dynamic: group_shape is \(3, 3\), expected"),
    (
        lambda: dynamic(X, TOKEN, S.to("meta")),
        "quant_fp8_dynamic: scale_ub is on meta, expected cpu as x",
    ),
    (
        lambda: static(X, torch.ones(4), CHANNEL),
        r"quant_fp8_static: scale has shape \(4,\), expected \(1, 6\)",
    ),
    (
        lambda: static(X, torch.ones(1, 4), TOKEN),
        r"quant_fp8_static: scale has shape \(1, 4\), expected \(4, 1\)",
    ),
    (lambda: static(X, torch.ones(3, 2), (2, 2)), r"scale has shape \(3, 2\), expected \(2, 3\)"),
    (
        lambda: static(X, S.to("meta"), TENSOR),
        "quant_fp8_static: scale is on meta, expected cpu as x",
    ),
    (
        lambda: static(X, S, TENSOR, torch.uint8),
        "quant_fp8_static: dtype is torch.uint8, expected one of",
    ),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input(call: Callable[[], Any], message: str) -> None:
    """A wrong argument is named, with what it is and what is expected."""
    with pytest.raises(ValueError, match=message):
        call()
