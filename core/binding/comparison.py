"""Two runs of one op compared: copies of arguments, differences of results, and words for both."""

from __future__ import annotations

import copy
import enum
import numbers
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from inspect import signature
from typing import Any

import torch
from opgraft.base.text import printable
from torch import Tensor, nn

Tolerance = tuple[float, float]
"""The distance that two values may have: absolute, and relative to the largest number of their row."""

_PLAIN = (Tensor, nn.Parameter)
_MOST_BYTES = 1 << 30
_FIXED = (numbers.Number, str, bytes, type(None), enum.Enum, range, slice)
_FIXED_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what lists, tuples and mappings hold, each with its place."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from leaves(each, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            yield from leaves(each, f"{path}[{number}]")
    else:
        yield path, value


def tensors_within(value: Any) -> list[Tensor]:
    """Return the tensors in a value, in order: of lists, tuples and mappings too."""
    return [leaf for _, leaf in leaves(value) if isinstance(leaf, Tensor)]


def obstacle_to_copies(values: Any) -> str:
    """Say why ``values`` cannot be copied for a second run, or return ""."""
    for _, leaf in leaves(values):
        if not isinstance(leaf, Tensor) and not _is_fixed(leaf):
            return printable(
                f"an argument is a {type(leaf).__qualname__}, which two runs would share and may change"
            )
    tensors = tensors_within(values)
    if any(type(tensor) not in _PLAIN for tensor in tensors):
        return "an argument is of a class derived from Tensor"
    if any(tensor.is_meta for tensor in tensors):
        return "an argument is on the device meta, without values"
    if sum(tensor.nbytes for tensor in tensors if tensor.layout is torch.strided) > _MOST_BYTES:
        return f"the arguments take more than {_MOST_BYTES >> 30} GiB"
    return ""


def _is_fixed(value: Any) -> bool:
    """Return True if nothing can change a value, so that two runs may share it."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_fixed, value))
    if is_dataclass(value) and not isinstance(value, type):
        frozen: bool = getattr(value, "__dataclass_params__").frozen  # noqa: B009  # which has no annotation
        held = [getattr(value, field.name) for field in fields(value)]
        return frozen and all(map(_is_fixed, held))
    return isinstance(value, (*_FIXED, *_FIXED_OF_TORCH))


def copied(value: Any, known: dict[int, Any]) -> Any:
    """Copy a value with the tensors in it, in objects such as caches too; one that stands there twice is one copy.

    Modules are not copied: one becomes what is ``known`` for its ``id``, by default itself. A mapping that cannot be
    copied becomes a dictionary; of other such objects the original is taken.
    """
    if isinstance(value, nn.Module):
        return known.get(id(value), value)
    if isinstance(value, Tensor):  # deepcopy refuses results that have gradients
        if id(value) not in known:
            known[id(value)] = value.detach().clone()
        return known[id(value)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(copied(each, known) for each in value))
    if type(value) in (tuple, list):
        return type(value)(copied(each, known) for each in value)
    held = (
        {key: copied(each, known) for key, each in value.items()}
        if isinstance(value, Mapping)
        else value
    )
    if type(value) is dict:
        return held
    try:
        return copy.deepcopy(
            value, known
        )  # which takes the copies of tensors that it holds from what is known
    except Exception:  # of somebody's class
        return held


def difference(
    place: str, got: Any, expected: Any, tolerance: Tolerance
) -> tuple[float | None, str]:
    """Compare a leaf with the one that is expected.

    The relative tolerance is of the largest number in the row: sums cancel, and what is left of them has the error of
    what went in. Floats of 8 bits may be a step apart instead, which is of the number itself: values that are all but
    the same may be rounded to neighbours. Of a complex number both parts count.

    Returns:
        The error as a share of the tolerance, ``None`` if there is no number for it; then the difference in
        words, empty within the tolerance.
    """
    if not isinstance(got, Tensor) or not isinstance(expected, Tensor):
        same = type(got) is type(expected) and (got is expected or bool(got == expected))
        if same:
            return 0.0, ""
        return None, f"{place} is {description_of(got)}, expected {description_of(expected)}"
    if (got.shape, got.dtype, got.device) != (expected.shape, expected.dtype, expected.device):
        return None, f"{place} is {_form(got)}, expected {_form(expected)}"
    ours = _numbers(got)
    theirs = _numbers(expected)
    if torch.equal(ours, theirs):
        return 0.0, ""

    room = torch.zeros_like(theirs)
    if theirs.is_floating_point():
        room = _room(theirs, expected.dtype, tolerance)
    share = _shares(ours, theirs, room)
    outside = ~(share <= 1)  # NaN is outside, too
    error = share.max().item() if share.isfinite().all() else None
    if not outside.any():
        return error, ""
    worst = share.nan_to_num(torch.inf).argmax()
    index = [int(number) for number in torch.unravel_index(worst, share.shape)]
    found = _shown_number(ours, index)
    right = _shown_number(theirs, index)
    allowed = room[tuple(index)].item()
    return error, (
        f"{place}: {int(outside.sum())} of {outside.numel()} numbers are off by more than is allowed: "
        f"at {index} of {_form(expected)} it has {found}, expected {right}, allowed is {allowed:.2g}"
    )


def _shares(ours: Tensor, theirs: Tensor, room: Tensor) -> Tensor:
    """Return how far numbers are off, as shares of what is allowed; integers that differ are infinitely far off."""
    alike = _alike(ours, theirs)
    if not theirs.is_floating_point():
        return torch.zeros(theirs.shape, device=theirs.device).masked_fill(~alike, torch.inf)
    off = (ours - theirs).abs()
    return (off / room).masked_fill(alike, 0.0)


def _shown_number(x: Tensor, index: list[int]) -> str:
    number = x[tuple(index)].item()
    return f"{number:.6g}" if x.is_floating_point() else f"{number}"


def _room(expected: Tensor, dtype: torch.dtype, tolerance: Tolerance) -> Tensor:
    """Return how far each number may be from the one that is expected, which was of ``dtype`` before it was widened."""
    absolute, relative = tolerance
    largest = expected.abs().nan_to_num(0, 0, 0)
    if dtype.itemsize == 1:
        step = torch.finfo(dtype)
        absolute, relative = step.eps * step.smallest_normal, step.eps
    elif largest.dim() and largest.numel():
        largest = largest.amax(-1, keepdim=True)
    return (absolute + relative * largest).expand_as(expected)


def same(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors hold the same numbers; a NaN is one."""
    return one.shape == other.shape and bool(_alike(_numbers(one), _numbers(other)).all())


def _alike(one: Tensor, other: Tensor) -> Tensor:
    return (one == other) | (one.isnan() & other.isnan())


def _numbers(x: Tensor) -> Tensor:
    """Return what a tensor is compared by: of a complex one both parts, of half types and 8 bits float32.

    Integers stay what they are, as floats do not hold the large ones, and so does float64, which some devices lack.
    """
    x = x.detach()
    if x.is_complex():
        parts = torch.view_as_real(x.resolve_conj())
        x = parts.flatten(-2) if x.dim() else parts
    return x.float() if x.is_floating_point() and x.dtype != torch.float64 else x


def arguments_of(
    run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what an op is called with by the names of its parameters, parts of lists by theirs, without the op."""
    known = signature(run)
    try:
        given = known.bind(*args, **kwargs)
    except TypeError:  # of a static method, whose signature has no place for the op
        given = known.bind(*args[1:], **kwargs)
    parts = {
        f"{name}{path}": leaf
        for name, each in given.arguments.items()
        for path, leaf in leaves(each)
    }
    return {name: leaf for name, leaf in parts.items() if not isinstance(leaf, nn.Module)}


def description_of(value: Any) -> str:
    """Describe an argument in a line: a tensor by dtype, shape, device, strides and range, others in a few letters."""
    if not isinstance(value, Tensor):
        parts = tensors_within(value)
        told = f"{type(value).__qualname__} of {', '.join(map(description_of, parts))}"
        return told if parts else reprlib.repr(value)
    words = [_form(value)]
    if not value.is_contiguous():
        words.append(f"strides {list(value.stride())}")
    if value.is_floating_point() and not value.is_meta:
        wide = _numbers(value)
        finite = wide[wide.isfinite()]
        if finite.numel():
            words.append(f"from {finite.min().item():.4g} to {finite.max().item():.4g}")
        odd = (("NaN", int(wide.isnan().sum())), ("infinite", int(wide.isinf().sum())))
        words += [f"{count} {name}" for name, count in odd if count]
    return ", ".join(words)


def _form(x: Tensor) -> str:
    device = "" if x.is_cpu else f" on {x.device}"
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}{device}"
