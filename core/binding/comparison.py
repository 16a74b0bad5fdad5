"""Compare two calls of one op: copy arguments, find differences of results, describe both."""

from __future__ import annotations

import copy
import enum
import numbers
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from inspect import signature
from typing import Any

import torch
from opgraft.base.text import printable
from torch import Tensor, nn

Tolerance = tuple[float, float]
"""The allowed distance of two values: absolute, and relative to the largest number of their row."""

_PLAIN = (Tensor, nn.Parameter)
_MOST_BYTES = 1 << 30
_FIXED = (numbers.Number, str, bytes, type(None), enum.Enum, range, slice)
_FIXED_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class Differences:
    """The differences between two calls of one op.

    Attributes:
        error: the largest error as a share of the tolerance; ``None`` if there is no number for
            the error, such as for results of another shape.
        reasons: each difference beyond the tolerance, in words.
    """

    error: float | None = 0.0
    reasons: tuple[str, ...] = ()


def compare(
    found: Sequence[tuple[str, Any]], expected: Sequence[Any], allowed: Iterable[Tolerance]
) -> Differences:
    """Compare everything that a call has left with everything that another call has left.

    Args:
        found: the values of one call with their places, such as ``("the result[0]", tensor)``.
        expected: the values of the other call, in the same order.
        allowed: the tolerance of each.
    """
    errors = []
    reasons = []
    for (place, ours), theirs, tolerance in zip(found, expected, allowed, strict=True):
        error, reason = difference(place, ours, theirs, tolerance)
        errors.append(error)
        if reason:
            reasons.append(reason)
    known = [error for error in errors if error is not None]
    largest = max(known, default=0.0) if len(known) == len(errors) else None
    return Differences(largest, tuple(reasons))


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the parts of lists, tuples and mappings, each with a path such as ``[0]['mask']``."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from leaves(each, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            yield from leaves(each, f"{path}[{number}]")
    else:
        yield path, value


def tensors_within(value: Any) -> list[Tensor]:
    """Return the tensors in a value, in order; of lists, tuples and mappings, too."""
    return [leaf for _, leaf in leaves(value) if isinstance(leaf, Tensor)]


def obstacle_to_copies(values: Any) -> str:
    """Return the reason why values cannot be copied for a second call; empty if they can."""
    for _, leaf in leaves(values):
        if not isinstance(leaf, Tensor) and not _is_fixed(leaf):
            name = type(leaf).__qualname__
            return printable(f"an argument is a {name}, which two runs would share and may change")
    tensors = tensors_within(values)
    if any(type(tensor) not in _PLAIN for tensor in tensors):
        return "an argument is of a class derived from Tensor"
    if any(tensor.is_meta for tensor in tensors):
        return "an argument is on the device meta, without values"
    # Sparse tensors have no nbytes.
    sizes = [tensor.nbytes for tensor in tensors if tensor.layout is torch.strided]
    if sum(sizes) > _MOST_BYTES:
        return f"the arguments take more than {_MOST_BYTES >> 30} GiB"
    return ""


def _is_fixed(value: Any) -> bool:
    """Return True if nothing can change a value, so that two calls may share the value."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_fixed, value))
    if is_dataclass(value) and not isinstance(value, type):
        # The attribute has no annotation, so that mypy does not know the attribute.
        frozen: bool = getattr(value, "__dataclass_params__").frozen  # noqa: B009
        held = [getattr(value, field.name) for field in fields(value)]
        return frozen and all(map(_is_fixed, held))
    return isinstance(value, (*_FIXED, *_FIXED_OF_TORCH))


def copied(value: Any, known: dict[int, Any]) -> Any:
    """Copy a value with all tensors inside, in objects such as caches, too.

    A tensor in two places becomes one copy. A mapping without a way to copy becomes a dictionary;
    another object without a way stays the original.

    Args:
        value: to copy.
        known: by ``id``, copies that exist already. Modules are not copied: a module is replaced
            by the known one, by default by itself.
    """
    if isinstance(value, nn.Module):
        return known.get(id(value), value)
    if isinstance(value, Tensor):
        # deepcopy refuses results with gradients.
        if id(value) not in known:
            known[id(value)] = value.detach().clone()
        return known[id(value)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(copied(each, known) for each in value))
    if type(value) in (tuple, list):
        return type(value)(copied(each, known) for each in value)
    held = value
    if isinstance(value, Mapping):
        held = {key: copied(each, known) for key, each in value.items()}
    if type(value) is dict:
        return held
    try:
        # deepcopy takes the copies of tensors inside from ``known``.
        return copy.deepcopy(value, known)
    # Somebody's class may raise anything.
    except Exception:
        return held


def difference(
    place: str, got: Any, expected: Any, tolerance: Tolerance
) -> tuple[float | None, str]:
    """Compare a value with the expected one.

    The relative tolerance refers to the largest number in the row: sums cancel, and the rest has
    the error of the summands. Floats of 8 bits may be one step apart instead, relative to the
    number itself: nearly equal values may be rounded to neighbours. Both parts of a complex number
    count.

    Returns:
        The error as a share of the tolerance, ``None`` without a number; then the difference in
        words, empty within the tolerance.
    """
    if not isinstance(got, Tensor) or not isinstance(expected, Tensor):
        if type(got) is type(expected) and (got is expected or bool(got == expected)):
            return 0.0, ""
        return None, f"{place} is {description_of(got)}, expected {description_of(expected)}"
    if (got.shape, got.dtype, got.device) != (expected.shape, expected.dtype, expected.device):
        return None, f"{place} is {form_of(got)}, expected {form_of(expected)}"
    return _difference_of_numbers(place, got, expected, tolerance)


def _difference_of_numbers(
    place: str, got: Tensor, expected: Tensor, tolerance: Tolerance
) -> tuple[float | None, str]:
    ours = _numbers(got)
    theirs = _numbers(expected)
    # Most calls end here: equal numbers need no tolerance.
    if torch.equal(ours, theirs):
        return 0.0, ""
    room = torch.zeros_like(theirs)
    if theirs.is_floating_point():
        room = _room(theirs, expected.dtype, tolerance)
    share = _shares(ours, theirs, room)
    error = share.max().item() if share.isfinite().all() else None
    # Not share > 1: NaN is outside, too.
    outside = ~(share <= 1)
    if not outside.any():
        return error, ""
    worst = share.nan_to_num(torch.inf).argmax()
    index = [int(number) for number in torch.unravel_index(worst, share.shape)]
    where = f"{index} of {form_of(expected)}"
    count = f"{int(outside.sum())} of {outside.numel()} numbers"
    return error, (
        f"{place}: {count} are off by more than is allowed: at {where} "
        f"{_shown_numbers(ours, theirs, room, index)}"
    )


def _shown_numbers(ours: Tensor, theirs: Tensor, room: Tensor, index: Sequence[int]) -> str:
    """Describe one number of a result: the value, the expected value, the tolerance."""
    found = _shown_number(ours, index)
    right = _shown_number(theirs, index)
    allowed = room[tuple(index)].item()
    return f"it has {found}, expected {right}, allowed is {allowed:.2g}"


def _shares(ours: Tensor, theirs: Tensor, room: Tensor) -> Tensor:
    """Return errors as shares of the tolerance; integers that differ have an infinite error."""
    alike = _alike(ours, theirs)
    if not theirs.is_floating_point():
        return torch.zeros(theirs.shape, device=theirs.device).masked_fill(~alike, torch.inf)
    off = (ours - theirs).abs()
    return (off / room).masked_fill(alike, 0.0)


def _shown_number(x: Tensor, index: Sequence[int]) -> str:
    number = x[tuple(index)].item()
    return f"{number:.6g}" if x.is_floating_point() else f"{number}"


def _room(expected: Tensor, dtype: torch.dtype, tolerance: Tolerance) -> Tensor:
    """Return the allowed error of each number; ``dtype`` is the one before widening."""
    absolute, relative = tolerance
    largest = expected.abs().nan_to_num(0, 0, 0)
    # Equal values may be rounded to neighbours, so one step of the format is allowed.
    if dtype.itemsize == 1:
        step = torch.finfo(dtype)
        absolute = step.eps * step.smallest_normal
        relative = step.eps
    elif largest.dim() and largest.numel():
        largest = largest.amax(-1, keepdim=True)
    return (absolute + relative * largest).expand_as(expected)


def same(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors hold the same numbers; one NaN is as good as another."""
    return one.shape == other.shape and not bool(unequal(one, other).any())


def unequal(one: Tensor, other: Tensor) -> Tensor:
    """Return True for each number that differs in two tensors of one shape."""
    return ~_alike(_numbers(one), _numbers(other))


def _alike(one: Tensor, other: Tensor) -> Tensor:
    return (one == other) | (one.isnan() & other.isnan())


def _numbers(x: Tensor) -> Tensor:
    """Return the numbers to compare: float32 of half types and 8 bits, both parts of complex ones.

    Integers stay integers, as floats cannot hold large ones. float64 stays, and other floats do not
    become float64, as some devices lack float64.
    """
    x = x.detach()
    if x.is_complex():
        parts = torch.view_as_real(x.resolve_conj())
        x = parts.flatten(-2) if x.dim() else parts
    return x.float() if x.is_floating_point() and x.dtype != torch.float64 else x


def arguments_of(
    run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by parameter, such as ``x`` or ``caches[0]``; not the op."""
    known = signature(run)
    try:
        given = known.bind(*args, **kwargs)
    except TypeError:
        # The signature of a static method has no place for the op.
        given = known.bind(*args[1:], **kwargs)
    found = {}
    for name, each in given.arguments.items():
        for path, leaf in leaves(each):
            if not isinstance(leaf, nn.Module):
                found[f"{name}{path}"] = leaf
    return found


def description_of(value: Any) -> str:
    """Describe an argument in a line: a tensor by form, strides and range, others briefly."""
    if not isinstance(value, Tensor):
        parts = tensors_within(value)
        if not parts:
            return reprlib.repr(value)
        return f"{type(value).__qualname__} of {', '.join(map(description_of, parts))}"
    words = [form_of(value)]
    if not value.is_contiguous():
        words.append(f"strides {list(value.stride())}")
    if value.is_floating_point() and not value.is_meta:
        words += _range_of(_numbers(value))
    return ", ".join(words)


def _range_of(x: Tensor) -> Iterator[str]:
    """Describe the numbers of a tensor: the finite ones by their range, then NaN and infinity."""
    finite = x[x.isfinite()]
    if finite.numel():
        yield f"from {finite.min().item():.4g} to {finite.max().item():.4g}"
    for name, odd in (("NaN", x.isnan()), ("infinite", x.isinf())):
        count = int(odd.sum())
        if count:
            yield f"{count} {name}"


def form_of(x: Tensor) -> str:
    """Return dtype and shape, such as ``float32 [2, 3]``, and the device if not the CPU."""
    device = "" if x.is_cpu else f" on {x.device}"
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}{device}"
