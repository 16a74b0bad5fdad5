"""The difference between what two modules compute from the same arguments, held against what is allowed, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from opgraft.ops.attention.batch import AttentionBatch, attending
from opgraft.ops.spec import Tolerance
from opgraft.text import described
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
    found = [*results, *(after for before, after in zip(given, taken, strict=True) if not same(before, after))]
    if len(found) != len(expected):
        return None, f"it returned or wrote {len(found)} tensors, the native model {len(expected)}"
    told = [_difference(*row) for row in zip(found, expected, allowed, strict=True)]
    reasons = [reason for _, reason in told if reason]
    shares = [share for share, _ in told]
    return (None if None in shares else max(filter(None, shares), default=0.0)), (reasons or [""])[0]


def _difference(ours: Tensor, theirs: Tensor, allowed: Tolerance) -> tuple[float | None, str]:
    """Compare two tensors; of each row the relative tolerance is of its largest number.

    In 8 bits it is of the number itself: these round by steps that are large beside what a kernel adds up.
    """
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return None, f"its result is {_shape(ours)}, that of the native model {_shape(theirs)}"
    if not theirs.numel():
        return 0.0, ""
    (atol, rtol), mine, wanted = allowed, _numbers(ours), _numbers(theirs.to(ours.device))
    exact, alike = not wanted.is_floating_point(), _alike(mine, wanted)
    wide = wanted.double()
    largest = wide.abs().nan_to_num(0, 0, 0)
    if wide.dim() and not in_eight_bits(theirs.dtype):
        largest = largest.amax(-1, keepdim=True)
    room = (atol + rtol * largest).expand_as(wide)
    off = (mine.double() - wide).abs()
    outside = ~alike if exact else ~alike & ~(off <= room)  # which a NaN is, too
    share = (off / room).masked_fill(alike, 0.0)
    error = share.max().item() if share.isfinite().all() else None
    if not outside.any():
        return error, ""
    worst = int(share.nan_to_num(torch.inf).argmax())
    index = [int(each) for each in torch.unravel_index(torch.tensor(worst), wanted.shape)]
    found, right = (f"{x[tuple(index)].item():{'' if exact else '.6g'}}" for x in (mine, wanted))
    return error, (
        f"{int(outside.sum())} of {wanted.numel()} numbers are off by more than is allowed: at {index} of "
        f"{_shape(theirs)} it has {found}, the native model {right}, allowed is {room[tuple(index)].item():.2g}"
    )


def allowed_in_eight_bits(dtype: torch.dtype) -> Tolerance:
    """Return the tolerance of floating point in 8 bits: a step to the next number."""
    info = torch.finfo(dtype)
    return info.eps * info.smallest_normal, info.eps


def in_eight_bits(dtype: torch.dtype) -> bool:
    """Tell whether a dtype is floating point in 8 bits."""
    return dtype.is_floating_point and dtype.itemsize == 1


def tensors_within(value: Any) -> list[Tensor]:
    """Return the tensors in a value, in order: of sequences and mappings too."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [each for part in value.values() for each in tensors_within(part)]
    return [each for part in value for each in tensors_within(part)] if isinstance(value, tuple | list) else []


def same(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors hold the same numbers; a NaN is one."""
    return one.shape == other.shape and bool(_alike(_numbers(one), _numbers(other)).all())


def _alike(one: Tensor, other: Tensor) -> Tensor:
    return (one == other) | (one.isnan() & other.isnan())


def _numbers(x: Tensor) -> Tensor:
    """Return what a tensor is compared by: numbers in double precision, of a complex one both parts.

    Integers stay what they are, as double precision does not hold the large ones.
    """
    if x.is_complex():
        parts = torch.view_as_real(x.detach().resolve_conj())
        x = parts.flatten(-2) if x.dim() else parts
    return x.detach().double() if x.is_floating_point() else x.detach()


def description_of(value: Any) -> str:
    """Describe an argument in a line: of a tensor its dtype, shape, strides, device and range."""
    if not isinstance(value, Tensor):
        parts = tensors_within(value)
        return f"{type(value).__name__} of {', '.join(map(description_of, parts))}" if parts else f"{value!r:.80}"
    told = [_shape(value), str(value.device)]
    if not value.is_contiguous():
        told.append(f"strides {list(value.stride())}")
    if value.numel() and not value.is_complex():
        wide = value.detach().double()
        told.append(f"from {wide.nan_to_num().min().item():.4g} to {wide.nan_to_num().max().item():.4g}")
        told += [
            f"{int(odd.sum())} {name}" for name, odd in (("NaN", wide.isnan()), ("infinite", wide.isinf())) if odd.any()
        ]
    return ", ".join(told)


def _shape(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
