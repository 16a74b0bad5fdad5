"""A module called again, and what comes of it held against what is expected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from opgraft.base.text import described
from opgraft.binding.comparison import Tolerance, difference, same, tensors_within
from opgraft.ops.attention.batch import AttentionBatch, attending
from torch import Tensor, nn


def outcome_of(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    batch: AttentionBatch | None,
    expected: Sequence[Tensor],
    allowed: Sequence[Tolerance],
) -> tuple[float | None, str]:
    """Call a module, and compare its results, and what it has written to its arguments, with what is expected.

    Returns:
        The largest error as a share of what is allowed, or ``None`` where results cannot be compared; and how the
        results leave their tolerance, empty if they do not.
    """
    given = [value.clone() for value in tensors_within((args, kwargs))]
    try:
        with nullcontext() if batch is None else attending(batch):
            results = tensors_within(module(*args, **kwargs))
    except Exception as error:  # the kernel's own
        return None, f"it raised {described(error)}"
    taken = tensors_within((args, kwargs))
    written = [after for before, after in zip(given, taken, strict=True) if not same(before, after)]
    found = [("its result", each) for each in results] + [
        ("what it wrote", each) for each in written
    ]
    if len(found) != len(expected):
        return None, f"it returned or wrote {len(found)} tensors, the native model {len(expected)}"
    rows = zip(found, expected, allowed, strict=True)
    told = [
        difference(place, ours, theirs.to(ours.device), room)
        for (place, ours), theirs, room in rows
    ]
    shares, reasons = [share for share, _ in told], [reason for _, reason in told if reason]
    return (None if None in shares else max(filter(None, shares), default=0.0)), (reasons or [""])[
        0
    ]
