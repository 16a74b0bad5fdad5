"""Two implementations of an op side by side: tensors, gradients and time."""

from __future__ import annotations

import pytest
import torch
from opgraft.binding.comparison import Differences, compare
from opgraft.testing.side_by_side import expect_same, loses_gradients, other_tensors, seconds_of

NAN = float("nan")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.int32])
def test_equal_tensors_are_the_same(dtype: torch.dtype) -> None:
    """Numbers are compared bit by bit, and one NaN equals another in every dtype."""
    values = torch.tensor([1.0, NAN, 3.0] if dtype.is_floating_point else [1, 2, 3]).to(dtype)
    expect_same("a call", [values], [values.clone()])


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (torch.tensor([1.0, 2.0, 4.0]), "a call has other values: 1 of 3 differ"),
        (torch.tensor([1.0, NAN, 3.0]), "a call has other values: 1 of 3 differ"),
        (torch.tensor([1.0, 2.0]), r"a call is \(2,\) torch.float32, expected \(3,\)"),
        (torch.tensor([1, 2, 3]), r"a call is \(3,\) torch.int64, expected .* torch.float32"),
    ],
)
def test_other_tensors_are_not_the_same(found: torch.Tensor, told: str) -> None:
    """The message tells what differs."""
    with pytest.raises(AssertionError, match=told):
        expect_same("a call", [found], [torch.tensor([1.0, 2.0, 3.0])])


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ([torch.ones(2, 3)], []),
        ([], ["returns 0 tensors, expected 1,"]),
        ([torch.ones(2, 3).half()], ["returns float16 [2, 3], expected float32 [2, 3],"]),
        ([torch.ones(3, 2)], ["returns float32 [3, 2], expected float32 [2, 3],"]),
        (
            [torch.ones(3, 2).t()],
            ["returns a tensor that is not contiguous, with strides [1, 2], expected [3, 1],"],
        ),
    ],
)
def test_forms_of_results(found: list[torch.Tensor], told: list[str]) -> None:
    """Number, dtype, shape and layout count, and numbers do not."""
    assert list(other_tensors(found, [torch.zeros(2, 3)])) == told


def test_rows_of_copied_results_may_lie_in_any_order() -> None:
    """Compiled code copies results: rows need to be in one piece only."""
    rows = torch.ones(3, 2, 4).transpose(0, 1)
    assert list(other_tensors([rows], [torch.ones(2, 3, 4)], made_contiguous=True)) == []
    assert list(other_tensors([rows], [torch.ones(2, 3, 4)])) != []


def test_lost_gradients() -> None:
    """A result without a gradient is a loss if the expected one has a gradient."""
    plain = torch.ones(2)
    required = torch.ones(2, requires_grad=True)
    assert loses_gradients([plain], [required])
    assert not loses_gradients([required], [plain])


def test_the_time_of_a_call(site) -> None:
    """A first call is not timed, and the time is that of one call."""
    calls: list[int] = []
    assert seconds_of(lambda: calls.append(1), 5) < 1
    assert len(calls) == 6


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([1.0, 2.0], Differences(0.0, ())),
        ([1.0, 2.25], Differences(0.5, ())),
        ([1.0, NAN], None),
    ],
)
def test_differences_of_calls(found: list[float], expected: Differences | None) -> None:
    """The error is the largest share of the tolerance; without a number there is a reason only."""
    pair = [("the result", torch.tensor(found))]
    differences = compare(pair, [torch.tensor([1.0, 2.0])], [(0.5, 0.0)])
    if expected is not None:
        assert differences == expected
        return
    assert differences.error is None
    assert differences.reasons[0].startswith("the result: 1 of 2 numbers are off")
