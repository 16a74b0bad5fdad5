"""Two runs of one op compared: copies of what they are given, differences of what they leave, and words for both."""

from __future__ import annotations

import enum
import importlib
import math
import numbers
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from inspect import signature
from typing import Any

import torch
from opgraft.state import host_state
from opgraft.text import printable
from torch import Tensor, nn

Tolerance = tuple[float, float]

_CATALOGUE, _SPECS = "opgraft.testing.catalogue", "opgraft.ops.spec"
"""Modules that stand above this one, imported by those who compare, and by nobody else."""

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


def obstacle_to_copies(values: Any) -> str:
    """Say why ``values`` cannot be copied for a second run, or return ""."""
    for _, leaf in leaves(values):
        if not isinstance(leaf, Tensor) and not _is_fixed(leaf):
            return printable(f"an argument is a {type(leaf).__qualname__}, which two runs would share and may change")
    tensors = [leaf for _, leaf in leaves(values) if isinstance(leaf, Tensor)]
    if any(type(tensor) not in _PLAIN for tensor in tensors):
        return "an argument is of a class derived from Tensor"
    if any(tensor.is_meta for tensor in tensors):
        return "an argument is on the device meta, without values"
    if sum(tensor.nbytes for tensor in tensors if tensor.layout is torch.strided) > _MOST_BYTES:
        return f"the arguments take more than {_MOST_BYTES >> 30} GiB"
    return ""


def _is_fixed(value: Any) -> bool:
    """Decide whether nothing can change a value, so that two runs may share it."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_fixed, value))
    if is_dataclass(value) and not isinstance(value, type):
        frozen: bool = getattr(value, "__dataclass_params__").frozen  # noqa: B009  # which has no annotation
        return frozen and all(_is_fixed(getattr(value, field.name)) for field in fields(value))
    return isinstance(value, (*_FIXED, *_FIXED_OF_TORCH))


def copied(value: Any, known: dict[int, Tensor]) -> Any:
    """Copy the tensors in lists, tuples and mappings; one that stands there twice is one copy. The rest is shared."""
    if isinstance(value, Tensor):
        if id(value) not in known:
            known[id(value)] = value.detach().clone()
        return known[id(value)]
    if isinstance(value, Mapping):
        return {key: copied(each, known) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(copied(each, known) for each in value))
    return type(value)(copied(each, known) for each in value) if type(value) in (list, tuple) else value


def tolerance_of(target: type, dtypes: Iterable[torch.dtype]) -> Tolerance:
    """Return how far two implementations of an op may be apart: each may be off by the op's own tolerance.

    Of the tolerances of several functional forms and dtypes it is the widest; that of most ops where none is proved.
    """
    catalogue, registry = importlib.import_module(_CATALOGUE), host_state().registry
    proved = [s for s in catalogue.SPECS.values() if registry.find_target(s.functional.op) in target.__mro__]
    usual: Mapping[torch.dtype, Tolerance] = importlib.import_module(_SPECS).TOLERANCES
    tables = [spec.tolerances for spec in proved] or [{}]
    pairs = [{**usual, **table}.get(dtype) for table in tables for dtype in dtypes]
    known = [pair for pair in pairs if pair] or [(0, 0)]
    return 2 * max(pair[0] for pair in known), 2 * max(pair[1] for pair in known)


def difference(place: str, got: Any, expected: Any, tolerance: Tolerance) -> str:
    """Say how a leaf differs from the one that is expected, or return "".

    The absolute tolerance is that of values around one; of larger ones it grows with the largest, as sums of such have
    an error of that size however small they are. Floats of 8 bits may be one step of theirs farther apart, and the
    largest does not count: values that are all but the same may be rounded to neighbours.
    """
    if not isinstance(got, Tensor) or not isinstance(expected, Tensor):
        same = type(got) is type(expected) and (got is expected or bool(got == expected))
        return "" if same else f"{place} is {described(got)}, expected {described(expected)}"
    if (got.shape, got.dtype, got.device) != (expected.shape, expected.dtype, expected.device):
        return f"{place} is {described(got)}, expected {described(expected)}"
    ours, theirs = _wide(got), _wide(expected)
    if torch.equal(ours, theirs):
        return ""
    wrong = (ours != theirs) & ~(ours.isnan() & theirs.isnan())
    if got.is_floating_point() or got.is_complex():
        within = (ours - theirs).abs() <= _allowed(theirs, expected.dtype, tolerance)
        wrong &= ~(within & theirs.isfinite())
    if not wrong.any():
        return ""
    distance = (ours - theirs).abs().nan_to_num(math.inf).masked_fill(~wrong, -1)
    farthest = distance.flatten().argmax()
    mine, other = (x.flatten()[farthest].item() for x in (ours, theirs))
    differing = wrong.any(-1) if got.is_complex() else wrong
    count = f"{int(differing.sum())} of {differing.numel()} values"
    return f"{place}, {described(expected)}: {count} differ, most of all {mine:.6g}, expected {other:.6g}"


def _allowed(expected: Tensor, dtype: torch.dtype, tolerance: Tolerance) -> Tensor:
    """Return how far each value may be from the one that is expected, which was of ``dtype`` before it was widened."""
    absolute, relative = tolerance
    if dtype.itemsize == 1:
        step = torch.finfo(dtype)
        absolute, relative = absolute + step.eps * step.smallest_normal, relative + step.eps
    else:
        finite = expected[expected.isfinite()].abs()
        absolute *= max(1.0, finite.max().item()) if finite.numel() else 1.0
    return absolute + relative * expected.abs()


def _wide(x: Tensor) -> Tensor:
    """Return values in a dtype in which devices can compute differences, complex ones as pairs."""
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return x.float() if x.is_floating_point() and x.dtype != torch.float64 else x if x.is_floating_point() else x.long()


def arguments_of(run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an op is called with by the names of its parameters, parts of lists by theirs, without the op."""
    known = signature(run)
    try:
        given = known.bind(*args, **kwargs)
    except TypeError:  # of a static method, whose signature has no place for the op
        given = known.bind(*args[1:], **kwargs)
    parts = {f"{name}{path}": leaf for name, each in given.arguments.items() for path, leaf in leaves(each)}
    return {name: leaf for name, leaf in parts.items() if not isinstance(leaf, nn.Module)}


def described(value: Any) -> str:
    """Describe a tensor by dtype, shape and range, anything else in a few letters."""
    if not isinstance(value, Tensor):
        return reprlib.repr(value)
    words = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    strides = "" if value.is_contiguous() else f" with strides {list(value.stride())}"
    device = "" if value.is_cpu else f" on {value.device}"
    if value.is_meta or not value.is_floating_point():
        return f"{words}{strides}{device}"
    wide = _wide(value)
    finite = wide[wide.isfinite()]
    range_ = f" from {finite.min().item():.4g} to {finite.max().item():.4g}" if finite.numel() else ""
    strange = value.numel() - finite.numel()
    return f"{words}{strides}{device}{range_}{f', {strange} not finite' if strange else ''}"
