"""Two implementations of an op side by side: differences between their tensors, and their time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from opgraft.binding.comparison import form_of, same, unequal
from opgraft.plugins.selection import current_platform
from torch import Tensor


def other_tensors(
    found: Sequence[Tensor], expected: Sequence[Tensor], *, made_contiguous: bool = False
) -> Iterator[str]:
    """Yield differences in number, dtype, shape, device and layout, whatever numbers tensors hold.

    Args:
        found: the results of a kernel.
        expected: the results of the native definition.
        made_contiguous: True if compiled code copies the results, so that the order of rows in
            memory does not matter.
    """
    if len(found) != len(expected):
        yield f"returns {len(found)} tensors, expected {len(expected)},"
        return
    for ours, theirs in zip(found, expected, strict=True):
        if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            yield f"returns {form_of(ours)}, expected {form_of(theirs)},"
        elif ours.device != theirs.device:
            yield f"returns a tensor on {ours.device}, expected {theirs.device},"
        # A reader of rows needs each row in one piece only.
        elif made_contiguous and ours.stride()[-1:] == (1,):
            continue
        elif theirs.is_contiguous() and not ours.is_contiguous():
            strides = f"strides {list(ours.stride())}, expected {list(theirs.stride())},"
            yield f"returns a tensor that is not contiguous, with {strides}"


def loses_gradients(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Return True if a result requires no gradient, and the expected one does."""
    pairs = zip(found, expected, strict=False)
    return any(theirs.requires_grad and not ours.requires_grad for ours, theirs in pairs)


def expect_same(what: str, found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Check that tensors have the same shape, dtype and numbers.

    Raises:
        AssertionError: two tensors differ; the message begins with ``what``.
    """
    for ours, theirs in zip(found, expected, strict=True):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            raise AssertionError(f"{what} is {_form(ours)}, expected {_form(theirs)}")
        if not same(ours, theirs):
            count = int(unequal(ours, theirs).sum())
            raise AssertionError(f"{what} has other values: {count} of {ours.numel()} differ")


def _form(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def seconds_of(call: Callable[[], object], number: int = 1) -> float:
    """Return the seconds of one call, as the mean of a number of calls."""
    wait = current_platform().synchronize
    # The first call is not timed: caches and choices are made in that call.
    call()
    wait()
    start = time.perf_counter()
    for _ in range(number):
        call()
    wait()
    return (time.perf_counter() - start) / number
