"""Departures of a kernel from the native definition, on inputs that no proof has tried.

The truth is the native definition in float64, which its proof compares with an independent
reference. Only inputs count that the native definition takes. A kernel may be as far off as the
native definition is in the same dtype, and as far as the truth itself moves by a rounding of the
inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property

import torch
from opgraft.base.text import described
from opgraft.ops.spec import Arguments, OpSpec, in_float64, tensors
from opgraft.platform import HOST
from opgraft.testing import checks
from opgraft.testing.examples import Example
from torch import Tensor

MARGIN = 4.0
"""A kernel may be so many times as far off as the native definition, which may be close by luck."""

SENSITIVITY = 8.0
"""A kernel may be so many times as far off as the truth moves if inputs move by a rounding."""

MOVES = 4
"""Times that the inputs move."""

WALK = 4.0
"""A row moves by the square root of the length, divided by this, as by so many roundings."""

LONG = 2048
"""Elements of a row from which sums may lose more than the tolerance, as a random walk does."""

ROUNDING = 1.12
"""The mean error in half types, as a multiple of the native definition's: one more rounding in
three makes 1.2 of it."""

HUGE = 1 << 14
"""Rows or elements from which a kernel may raise an error. Wrong numbers are wrong at any size."""

FEWEST_NUMBERS = 2000
"""Numbers from which a mean error, or a share of them, says something."""

FEWEST_ROWS = 32
"""Rows from which a mean error, or a share of codes, says something: one rounding of a number that
a whole row shares, such as a scale, moves many of its results."""

OTHER_CODES = 0.05
"""The share of 8-bit codes that may differ by a step from those of the native definition."""


class NotTaken(Exception):  # noqa: N818  # no error of a kernel
    """A module refused inputs that the native module refuses, too."""


class Expected:
    """The answers of the native definition, each computed when it is needed.

    Attributes:
        spec: of the form.
        arguments: of the call.
        exact: the results in float64.

    Raises:
        Exception: anything that the native definition raises for the arguments.
    """

    def __init__(self, spec: OpSpec, arguments: Arguments) -> None:
        self.spec = spec
        self.arguments = arguments
        self._wide = in_float64(arguments)
        self._has_wide = True
        try:
            self.exact = self._truth(self._wide)
        # A definition may take narrow dtypes only. Inputs that it never takes raise again.
        except Exception:
            self.native  # noqa: B018
            self._has_wide = False
            self.exact = self._truth(self._wide)

    @cached_property
    def native(self) -> list[Tensor]:
        """The results in the dtypes of the arguments."""
        return [each.to(HOST) for each in self._own]

    @cached_property
    def classes(self) -> list[type]:
        """The classes of the results. A device in Python has tensors of its own class."""
        return list(map(type, self._own))

    @cached_property
    def _own(self) -> list[Tensor]:
        return self._results(self.arguments)

    @cached_property
    def moved(self) -> list[Tensor]:
        """By how much float64 results move if each number moves by a rounding of the arithmetic.

        The largest of several moves counts, as one of them may cancel.
        """
        generator = torch.Generator().manual_seed(0)
        found = [torch.zeros_like(each, dtype=torch.float64) for each in self.exact]
        for _ in range(MOVES):
            results = self._truth(self._moved_inputs(generator))
            for place, (result, exact) in enumerate(zip(results, self.exact, strict=True)):
                off = (result.double() - exact.double()).abs()
                found[place] = torch.maximum(found[place], off.nan_to_num(0, 0, 0))
        return found

    def _moved_inputs(self, generator: torch.Generator) -> Arguments:
        moved = dict(self._wide)
        for name, value in self._wide.items():
            if not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            # Scales of MXFP4 are powers of two. A reference takes other scales for other formats.
            if bool((value.frexp().mantissa.abs() == 0.5).all()):
                continue
            # Half types are computed in float32.
            own = self.arguments[name].dtype
            computed = own if own == torch.float64 else torch.float32
            eps = torch.finfo(computed).eps
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            value = value * (1 + eps * noise)
            # Where all products of a sum have one sign, moves of its numbers cancel, and roundings
            # of the sum do not: they grow like a random walk. So each row moves as a whole, too.
            if value.dim():
                steps = max(1.0, math.sqrt(value.shape[-1]) / WALK)
                rows = (*value.shape[:-1], 1)
                noise = torch.randn(rows, generator=generator, dtype=torch.float64)
                value = value * (1 + eps * steps * noise)
            moved[name] = value
        return moved

    @cached_property
    def forms(self) -> list[tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of each result."""
        mutates = self.spec.functional.mutates
        made = [self.arguments[name] for name in mutates]
        if not mutates:
            made = tensors(self.spec.functional.fake(**self.arguments))
        return [(each.shape, each.dtype) for each in made]

    def _truth(self, wide: Arguments) -> list[Tensor]:
        """Return the results in float64: of the native definition, or else of the reference."""
        if self._has_wide:
            return self._results(wide)
        with torch.no_grad():
            return tensors(self.spec.reference(**wide))

    @torch.no_grad()
    def _results(self, arguments: Arguments) -> list[Tensor]:
        return checks.results_of(self.spec, self.spec.functional.native, arguments)


def expected(spec: OpSpec, example: Example, most: float = math.inf) -> Expected | None:
    """Return the native answers; ``None`` if the native definition does not take the inputs.

    Args:
        spec: of the form.
        example: the inputs.
        most: numbers in drawn tensors. Larger inputs are not taken either.
    """
    # A spec may refuse sizes in any way.
    try:
        return Expected(spec, example.arguments(spec, most))
    except Exception:
        return None


def departure(example: Example, call: checks.Implementation, wanted: Expected) -> str:
    """Return how the result of a call departs from the native definition; empty within bounds.

    Raises:
        NotTaken: the call is of a module, and the native module refuses the inputs, too.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(example.threads)
    try:
        with torch.no_grad():
            results = checks.results_of(wanted.spec, call, wanted.arguments)
    except NotTaken:
        raise
    # The kernel's own exceptions, of any kind.
    except Exception as error:
        if max(*example.lead, example.size, 0) >= HUGE:
            return ""
        return _unless_refused(wanted, f"it raised {described(error)}")
    finally:
        torch.set_num_threads(before)
    others = [type(each) for each in results if type(each) is not Tensor]
    if others and list(map(type, results)) != wanted.classes:
        names = ", ".join(each.__qualname__ for each in others)
        return f"it made tensors of other classes: {names}"
    return differing(results, wanted, example.dtype)


def _unless_refused(wanted: Expected, told: str) -> str:
    """Return the words, unless the native definition refuses the dtype of the call, too."""
    try:
        wanted.native  # noqa: B018  # computed here
    except Exception:
        return ""
    return f"{told}, and the native definition does not"


def differing(results: list[Tensor], wanted: Expected, dtype: torch.dtype) -> str:
    """Return how results depart from the native definition's; empty within bounds.

    Args:
        results: of a kernel.
        wanted: the native answers.
        dtype: of the inputs.
    """
    if len(results) != len(wanted.exact):
        return f"it made {len(results)} tensors, expected {len(wanted.exact)}"
    for place, ours in enumerate(results):
        shape, own = wanted.forms[place]
        if (ours.shape, ours.dtype) != (shape, own):
            found = f"{tuple(ours.shape)} {ours.dtype}"
            return _unless_refused(wanted, f"it made {found}, expected {tuple(shape)} {own}")
        told = _differing(ours.to(HOST), place, wanted, dtype)
        if told:
            return told
    return ""


def _differing(ours: Tensor, place: int, wanted: Expected, dtype: torch.dtype) -> str:
    """Compare one result."""
    if not ours.numel():
        return ""
    if not ours.is_floating_point():
        return _other_integers(ours, place, wanted)
    if ours.itemsize == 1:
        return _other_numbers(ours, place, wanted, ours.dtype) or _other_codes(ours, place, wanted)
    told = _other_numbers(ours, place, wanted, dtype)
    if told or ours.itemsize > 2 or not _are_many(ours):
        return told
    least, _ = wanted.spec.tolerance(dtype)
    return _more_rounded(ours, place, wanted, least)


def _are_many(ours: Tensor) -> bool:
    """Return True if a result has enough numbers and rows for a mean error, or a share of codes."""
    return ours.numel() >= FEWEST_NUMBERS and ours.numel() >= FEWEST_ROWS * ours.shape[-1]


def _other_integers(ours: Tensor, place: int, wanted: Expected) -> str:
    exact = wanted.exact[place]
    if torch.equal(ours, exact):
        return ""
    native = wanted.native[place]
    wrong = ours != native
    # If the native definition is not sure itself, as of ties, another answer is right, too.
    if exact.dtype == native.dtype:
        wrong &= native == exact
    is_code = ours.dtype in (torch.int8, torch.uint8)
    if is_code:
        in_pairs = ours.dtype == torch.uint8 and torch.float4_e2m1fn_x2 in wanted.spec.tolerances
        wrong &= _steps(ours, native, in_pairs=in_pairs) > 1
    count = int(wrong.sum())
    if count:
        return f"{count} of {ours.numel()} integers are others"
    return _other_codes(ours, place, wanted) if is_code else ""


def _steps(ours: Tensor, native: Tensor, *, in_pairs: bool) -> Tensor:
    """Return by how many steps codes differ: integers, or pairs of 4-bit numbers."""
    if not in_pairs:
        return (ours.int() - native.int()).abs()
    low = (_ordered(ours & 15) - _ordered(native & 15)).abs()
    high = (_ordered(ours >> 4) - _ordered(native >> 4)).abs()
    return torch.maximum(low, high)


def _ordered(codes: Tensor) -> Tensor:
    """Return 4-bit numbers as integers in their order. The fourth bit is the sign."""
    magnitudes = (codes & 7).int()
    return torch.where(codes > 7, -magnitudes, magnitudes)


def _other_codes(ours: Tensor, place: int, wanted: Expected) -> str:
    # A single code at a tie is a large share of few.
    if not _are_many(ours):
        return ""
    native = wanted.native[place]
    other = (ours.float() != native.float()) & native.float().isfinite()
    share = other.float().mean().item()
    return f"{share:.0%} of all codes are others" if share > OTHER_CODES else ""


def _other_numbers(ours: Tensor, place: int, wanted: Expected, dtype: torch.dtype) -> str:
    atol, rtol = wanted.spec.tolerance(dtype)
    exact = wanted.exact[place].double()
    found = ours.double()
    room = atol + rtol * exact.abs()
    off = (found - exact).abs()
    # Most calls end here.
    if bool((off <= room).all()):
        return ""
    native = wanted.native[place].double()
    allowed = _allowed(ours, place, wanted, room)
    # An overflow of the definition itself proves nothing. NaN is outside.
    is_compared = native.isfinite() & exact.isfinite()
    wrong = is_compared & ~(off <= room * allowed)
    count = int(wrong.sum())
    if not count:
        return ""
    index = tuple(wrong.nonzero()[0].tolist())
    first = found[index].item()
    right = exact[index].item()
    return (
        f"{count} of {wrong.numel()} numbers are off: at {list(index)} it has {first:.7g}, "
        f"expected {right:.7g}"
    )


def _allowed(ours: Tensor, place: int, wanted: Expected, room: Tensor) -> Tensor:
    """Return for each row how many times the tolerance a kernel may be off, at least once."""
    exact = wanted.exact[place].double()
    off = (wanted.native[place].double() - exact).abs()
    # The definition may leave the tolerance, too. Only the kernel's same rows have the room then.
    allowed = MARGIN * _of_row(_share(off, room))
    if ours.itemsize > 1:
        moved = SENSITIVITY * _of_row(_share(wanted.moved[place], room))
        allowed = torch.maximum(allowed, moved).clamp(min=_walk(exact))
    return allowed.clamp(min=1.0)


def _walk(exact: Tensor) -> float:
    """Return the share of the tolerance by which a sum over a row may be off."""
    length = exact.shape[-1] if exact.dim() else 1
    return max(1.0, math.sqrt(length / LONG))


def _share(off: Tensor, room: Tensor) -> Tensor:
    """Return errors as shares of the tolerance. Equal numbers and overflows count as nothing."""
    return (off / room).masked_fill(off == 0, 0.0).nan_to_num(0, 0, 0)


def _of_row(share: Tensor) -> Tensor:
    """Return the largest share in each row."""
    return share.amax(-1, keepdim=True) if share.dim() else share


def _more_rounded(ours: Tensor, place: int, wanted: Expected, least: float) -> str:
    """Compare the mean errors of half types, all of them within the tolerance.

    Numbers below the absolute tolerance ``least`` do not count: their errors have no bound.
    """
    exact = wanted.exact[place].double()
    native = wanted.native[place].double()
    counted = native.isfinite() & exact.isfinite() & (exact.abs() > least)
    if int(counted.sum()) < FEWEST_NUMBERS:
        return ""
    unit = exact.abs() * torch.finfo(ours.dtype).eps

    def mean_of(found: Tensor) -> float:
        # Where terms cancel, an error has no bound.
        steps = ((found - exact).abs() / unit)[counted].clamp(max=4.0)
        return steps.mean().item()

    here = mean_of(ours.double())
    there = mean_of(native)
    # The definition may be exact, and then any error would be a multiple.
    if here <= ROUNDING * there + 0.01:
        return ""
    return (
        f"on average it is off by {here:.3f} steps of {ours.dtype}, the native definition by "
        f"{there:.3f}: it rounds once more"
    )


def shrunk(example: Example, is_wrong: Callable[[Example], object], tries: int = 100) -> Example:
    """Return a simpler example that is wrong, too."""
    while True:
        for smaller in example.smaller():
            tries -= 1
            if tries < 0:
                return example
            if is_wrong(smaller):
                example = smaller
                break
        else:
            return example
