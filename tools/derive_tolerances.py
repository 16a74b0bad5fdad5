"""Derive how far rounding may move the results of each form, as a share of the form's tolerance.

The native definition runs on intervals of python-flint. Each step of arithmetic widens an interval
by one rounding of its dtype, and a sum is rounded after each summand, from the first to the last.
So the interval holds the result of every kernel that takes these steps in this order. The distance
from the reference in float64 to the far end of the interval is the derived bound. Torch's own
result must lie in the interval: if it does not, torch takes other steps, and nothing is derived.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flint import arb, ctx  # type: ignore[import-not-found]  # of 'make tolerances'
from opgraft.ops.spec import Arguments, OpSpec, in_float64, tensors
from opgraft.testing.catalogue import SPECS
from torch import Tensor

ctx.prec = 100

MOST_NUMBERS = 6000
"""The most numbers in an argument. A step on intervals takes a microsecond."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

LIBRARY = 4
"""Units in the last place by which a function of a mathematical library, such as exp, may be off."""

untyped: Any = torch
"""Some functions of torch have no types."""

BALLS: list[arb] = []
"""All intervals. Tensors hold places in this list, so that torch itself moves elements."""


class NotDerivedError(Exception):
    """The definition has a step that intervals do not take."""


class Steps:
    """The arithmetic of a dtype on intervals. A function of several steps is written as its steps."""

    def __init__(self, dtype: torch.dtype) -> None:
        kind = torch.finfo(dtype)
        self.relative = arb(1, kind.eps / 2)
        self.tiny = arb(0, kind.smallest_normal * kind.eps / 2)
        self.library = arb(1, LIBRARY * kind.eps)

    def rounded(self, x: arb) -> arb:
        """Return a value after one rounding, which leaves zero as it is."""
        return x if x == 0 else x * self.relative + self.tiny

    def number(self, x: float) -> arb:
        """Return a number of Python as torch takes it: rounded, unless it is a whole number."""
        return arb(x) if x == round(x) else self.rounded(arb(x))

    def add(self, x: arb, y: arb) -> arb:
        return self.rounded(x + y)

    def sub(self, x: arb, y: arb) -> arb:
        return self.rounded(x - y)

    def mul(self, x: arb, y: arb) -> arb:
        return self.rounded(x * y)

    def div(self, x: arb, y: arb) -> arb:
        return self.rounded(x / y)

    def square(self, x: arb) -> arb:
        return self.rounded(x * x)

    def sqrt(self, x: arb) -> arb:
        return self.rounded(x.nonnegative_part().sqrt())

    def rsqrt(self, x: arb) -> arb:
        return self.rounded(1 / self.sqrt(x))

    def exp(self, x: arb) -> arb:
        return x.exp() * self.library + self.tiny

    def expm1(self, x: arb) -> arb:
        return x.expm1() * self.library + self.tiny

    def tanh(self, x: arb) -> arb:
        return x.tanh() * self.library + self.tiny

    def erf(self, x: arb) -> arb:
        return x.erf() * self.library + self.tiny

    def log1p(self, x: arb) -> arb:
        return x.log1p() * self.library + self.tiny

    def sigmoid(self, x: arb) -> arb:
        return self.rounded(1 / self.add(arb(1), self.exp(-x)))

    def silu(self, x: arb) -> arb:
        return self.div(x, self.add(arb(1), self.exp(-x)))

    def softplus(self, x: arb) -> arb:
        # Torch does not compute it for large numbers, which it changes by less than a rounding.
        return self.log1p(self.exp(x)) if x < 20 else x

    def gelu(self, x: arb) -> arb:
        bent = self.erf(self.mul(x, self.rounded(1 / arb(2).sqrt())))
        return self.mul(x / 2, self.add(arb(1), bent))

    def gelu_tanh(self, x: arb) -> arb:
        cube = self.mul(self.square(x), x)
        inner = self.add(x, self.mul(self.rounded(arb("0.044715")), cube))
        bent = self.tanh(self.mul(self.rounded((2 / arb.pi()).sqrt()), inner))
        return self.mul(x / 2, self.add(arb(1), bent))

    def sum(self, row: Sequence[arb]) -> arb:
        # The first number is no rounded sum.
        total, *rest = row or [arb(0)]
        for each in rest:
            total = self.rounded(total + each)
        return total

    def mean(self, row: Sequence[arb]) -> arb:
        total = self.sum(row)
        return total if len(row) == 1 else self.div(total, arb(len(row)))

    def amax(self, row: Sequence[arb]) -> arb:
        largest = row[0]
        for each in row[1:]:
            largest = largest.max(each)
        return largest

    def dot(self, row: Sequence[arb], column: Sequence[arb]) -> arb:
        return self.sum(list(map(self.mul, row, column)))

    def standardized(self, row: Sequence[arb], eps: float) -> list[arb]:
        # Torch multiplies first, and then subtracts the product of mean and scale.
        mean = self.mean(row)
        squares = [self.square(self.sub(each, mean)) for each in row]
        scale = self.rsqrt(self.add(self.mean(squares), self.number(eps)))
        shift = self.mul(mean, scale)
        return [self.sub(self.mul(each, scale), shift) for each in row]


class Enclosure(Tensor):
    """A tensor with an interval for each element: ``places`` has the indices in ``BALLS``."""

    places: Tensor

    @classmethod
    def of(cls, values: Tensor, places: Tensor) -> Enclosure:
        made = values.detach().as_subclass(cls)
        made.places = places
        return made

    @classmethod
    def exact(cls, values: Tensor) -> Enclosure:
        """Enclose values that are known."""
        return cls.of(values, kept(map(arb, numbers_of(values)), values.shape))

    @property
    def balls(self) -> list[arb]:
        return balls_at(self.places)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__
        if name in WRITES or name in IN_PLACE or kwargs.get("inplace"):
            return written(name, func, args, kwargs)
        if WRITING.fullmatch(name) or "out" in kwargs:
            raise NotDerivedError(f"its definition uses torch's {name}, which has no rule yet")
        values = func(*plain(args), **plain(kwargs))
        if not is_floating(values):
            expect_certain(name, values, args)
            return values
        if name in MOVES:
            return enclosed(values, MOVES[name](func, args, kwargs))
        if name in MADE:
            return cls.exact(values)
        if not isinstance(values, Tensor):
            raise NotDerivedError(f"its definition uses torch's {name}")
        return cls.of(values, computed(name, values.dtype, args, kwargs).reshape(values.shape))


def expect_certain(name: str, values: Any, args: Any) -> None:
    """Check that no rounding moves an answer that is no floating-point number.

    Raises:
        NotDerivedError: a code, a place or a comparison may jump.
    """
    if name in CERTAIN:
        return
    if name in COMPARISONS:
        ours, theirs = (balls_at(each) for each in untyped.broadcast_tensors(*map(place_of, args)))
        holds = values.flatten().tolist()
        # Of intervals that overlap, neither a comparison nor the opposite is certain.
        compare, opposite = COMPARISONS[name]
        for one, other, is_true in zip(ours, theirs, holds, strict=True):
            if not (compare if is_true else opposite)(one, other):
                raise NotDerivedError(
                    "it compares numbers that a rounding may move past each other"
                )
    elif isinstance(values, Tensor) and values.dtype in INTEGERS and name in TO_INTEGERS:
        for ball in args[0].balls:
            if math.trunc(float(ball.lower())) != math.trunc(float(ball.upper())):
                raise NotDerivedError("its results are codes, which jump at a rounding")
    elif isinstance(values, (Tensor, tuple, list)):
        raise NotDerivedError(OF_CODES)
    else:
        raise NotDerivedError(f"it takes a computed number by torch's {name}")


def computed(name: str, dtype: torch.dtype, args: Any, kwargs: Any) -> Tensor:
    """Return the places of the results of a step, one after another.

    Args:
        name: of the function of torch.
        dtype: of the results.
        args: of the call.
        kwargs: of the call.
    """
    if name in WHOLE:
        raise NotDerivedError(WHOLE[name])
    if name not in COMPUTED:
        raise NotDerivedError(f"its definition uses torch's {name}, which has no rule yet")
    if dtype in CODES:
        # Only a conversion makes them.
        return converted(placed(args[0]), args[0].dtype, dtype)
    # Torch computes half types in float32, and rounds once more behind the step.
    wide = torch.promote_types(dtype, torch.float32)
    made = COMPUTED[name](Steps(wide), *args, **kwargs)
    is_exact = name in EXACT or (name in CONVERSIONS and args[0].dtype == dtype)
    if dtype != wide and not is_exact:
        made = map(Steps(dtype).rounded, made)
    balls = list(made)
    return kept(balls, (len(balls),))


def converted(places: Tensor, before: torch.dtype, after: torch.dtype) -> Tensor:
    """Return the places of values in another dtype."""
    if torch.promote_types(before, after) == after if after not in CODES else before == after:
        return places
    step = partial(stepped, partial(rounded_to, after)) if after in CODES else Steps(after).rounded
    return kept(map(step, balls_at(places)), places.shape)


def rounded_to(dtype: torch.dtype, x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float64).to(dtype))


def stepped(step: Callable[[float], float], x: arb) -> arb:
    """Return the interval of a step function that never falls."""
    low, high = float(x.lower()), float(x.upper())
    # A float may lie on the other side of the end.
    if not x.is_exact():
        low, high = math.nextafter(low, -math.inf), math.nextafter(high, math.inf)
    low, high = step(low), step(high)
    return arb((low + high) / 2, (high - low) / 2)


def written(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Write to the first argument. Its views share the memory of values and of places."""
    target = args[0]
    if not isinstance(target, Enclosure) or not target.is_floating_point():
        raise NotDerivedError("it writes to codes, or to memory that it has made without a value")
    if name in WRITES:
        WRITES[name](target, *args[1:], **kwargs)
    else:
        named = {key: value for key, value in kwargs.items() if key != "inplace"}
        # A step may look at values, so they change later.
        places = computed(name.removesuffix("_"), target.dtype, args, named)
        target.places.copy_(places.reshape(target.shape))
    func(*plain(args), **plain(kwargs))
    return target


def source_for(target: Enclosure, value: Any) -> Tensor:
    """Return the places of a value in the dtype of the target."""
    if not isinstance(value, Tensor):
        return place_of(value)
    return converted(placed(value), value.dtype, target.dtype)


def write_at(target: Enclosure, index: Any, value: Any) -> None:
    target.places[plain(index)] = source_for(target, value)


def write_copy(target: Enclosure, value: Any, *_: Any) -> None:
    target.places.copy_(source_for(target, value))


def write_along(target: Enclosure, dim: int, index: Tensor, value: Any) -> None:
    target.places.index_copy_(dim, plain(index), source_for(target, value))


def kept(balls: Any, shape: Sequence[int]) -> Tensor:
    """Keep intervals, and return their places."""
    made = list(balls)  # to make one may keep others
    start = len(BALLS)
    BALLS.extend(made)
    return torch.arange(start, len(BALLS)).reshape(tuple(shape))


def balls_at(places: Tensor) -> list[arb]:
    return [BALLS[place] for place in places.flatten().tolist()]


def numbers_of(values: Tensor) -> list[float]:
    found: list[float] = plain(values).double().flatten().tolist()
    return found


def plain(value: Any) -> Any:
    """Return a value with tensors instead of enclosures."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain, value))
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return value.as_subclass(Tensor) if isinstance(value, Enclosure) else value


def placed(value: Any) -> Any:
    """Return a value with places instead of floating-point tensors."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(placed, value))
    if isinstance(value, dict):
        return {name: placed(each) for name, each in value.items()}
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.places if isinstance(value, Enclosure) else Enclosure.exact(value).places
    return value


def is_floating(values: Any) -> bool:
    if isinstance(values, (list, tuple)):
        return bool(values) and all(map(is_floating, values))
    return isinstance(values, Tensor) and values.is_floating_point()


def enclosed(values: Any, places: Any) -> Any:
    if isinstance(values, (list, tuple)):
        return tuple(itertools.starmap(enclosed, zip(values, places, strict=True)))
    return Enclosure.of(values, places)


def place_of(value: Any) -> Tensor:
    """Return the places of an operand: a tensor or a number."""
    return placed(value) if isinstance(value, Tensor) else kept([arb(value)], ())


def moved(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*placed(args), **placed(kwargs))


def moved_by_where(func: Any, args: Any, kwargs: Any) -> Any:
    condition, *choices = args
    return torch.where(plain(condition), *map(place_of, choices))


def moved_by_ids(func: Any, args: Any, kwargs: Any) -> Tensor:
    ids, table, *_ = args
    found: Tensor = placed(table)[plain(ids)]
    return found


def moved_by_pad(func: Any, args: Any, kwargs: Any) -> Tensor:
    def call(x: Tensor, pad: Any, mode: str = "constant", value: float | None = None) -> Tensor:
        filling = place_of(value or 0.0).item()
        # Torch reflects no integers. A float64 has room for all places.
        places = placed(x).double()
        if mode == "constant":
            return torch.nn.functional.pad(places, pad, mode, filling).long()
        return torch.nn.functional.pad(places, pad, mode).long()

    return call(*args, **kwargs)


def moved_by_mask(func: Any, args: Any, kwargs: Any) -> Tensor:
    x, mask, value = args
    return torch.where(plain(mask), place_of(value), placed(x))


Computed = Callable[..., Any]


def each_element(name: str) -> Computed:
    def compute(steps: Steps, *operands: Any, **_: Any) -> Iterator[arb]:
        places = []
        for each in operands:
            is_tensor = isinstance(each, Tensor)
            places.append(placed(each) if is_tensor else kept([steps.number(each)], ()))
        columns = map(balls_at, untyped.broadcast_tensors(*places))
        return map(getattr(steps, name), *columns)

    return compute


def turned(name: str) -> Computed:
    """Return a step on swapped operands, as for a number less a tensor."""
    compute = each_element(name)
    return lambda steps, one, other: compute(steps, other, one)


def rows_of(x: Tensor, *dims: int) -> Iterator[list[arb]]:
    """Yield the intervals over some dimensions, by default over the last one."""
    over = dims or (-1,)
    places = placed(x).movedim(over, tuple(range(-len(over), 0))).flatten(-len(over))
    return map(balls_at, places.reshape(-1, places.shape[-1]))


def of_rows(name: str) -> Computed:
    def compute(steps: Steps, x: Any, dim: Any = None, **_: Any) -> list[arb]:
        dims = dim if isinstance(dim, (list, tuple)) else (dim,)
        rows = [x.balls] if dims == (None,) else rows_of(x, *dims)
        return [getattr(steps, name)(row) for row in rows]

    return compute


def softmax(steps: Steps, x: Any, dim: int, **_: Any) -> Iterator[arb]:
    if dim not in (-1, x.dim() - 1):
        raise NotDerivedError("its softmax is over another dimension than the last one")
    for row in rows_of(x):
        largest = steps.amax(row)
        powers = [steps.exp(steps.sub(each, largest)) for each in row]
        total = steps.sum(powers)
        yield from (steps.div(each, total) for each in powers)


def matmul(steps: Steps, x: Any, y: Any) -> Iterator[arb]:
    if min(x.dim(), y.dim()) < 2:
        raise NotDerivedError("its definition multiplies vectors")
    ours, theirs = placed(x), placed(y).mT
    shape = untyped.broadcast_shapes(ours.shape[:-2], theirs.shape[:-2])
    # With one dimension more, there is always one to flatten.
    pairs = [each.expand(1, *shape, *each.shape[-2:]).flatten(0, -3) for each in (ours, theirs)]
    for rows, columns in zip(*pairs, strict=True):
        by_column = list(map(balls_at, columns))
        for row in map(balls_at, rows):
            yield from (steps.dot(row, column) for column in by_column)


def linear(steps: Steps, x: Any, weight: Any, bias: Any = None) -> Iterator[arb]:
    columns = list(map(balls_at, placed(weight)))
    summands = None if bias is None else balls_at(placed(bias))
    for row in rows_of(x):
        products = [steps.dot(row, column) for column in columns]
        yield from products if summands is None else map(steps.add, products, summands)


def layer_norm(
    steps: Steps, x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Iterator[arb]:
    """Norm rows; then apply a weight and a bias, if they are given."""
    factors, summands = (
        None if each is None else balls_at(placed(each)) for each in (weight, bias)
    )
    for row in rows_of(Enclosure.of(plain(x), placed(x)).flatten(-len(shape))):
        normed = steps.standardized(row, eps)
        if factors is not None:
            normed = list(map(steps.mul, normed, factors))
        yield from normed if summands is None else map(steps.add, normed, summands)


def clamp(steps: Steps, x: Any, min: Any = None, max: Any = None) -> list[arb]:
    made: list[arb] = x.balls
    if isinstance(min, Tensor) or isinstance(max, Tensor):
        raise NotDerivedError("its definition clamps by tensors")
    if min is not None:
        made = [each.max(arb(min)) for each in made]
    return made if max is None else [each.min(arb(max)) for each in made]


def threshold(steps: Steps, x: Any, least: float, other: float, **_: Any) -> list[arb]:
    passes = (plain(x) > least).flatten().tolist()
    return [each if is_more else arb(other) for each, is_more in zip(x.balls, passes, strict=True)]


def power(steps: Steps, x: Any, exponent: float) -> list[arb]:
    if exponent not in (2, 3):
        raise NotDerivedError(f"its definition takes the power {exponent}")
    squares = list(map(steps.square, x.balls))
    return squares if exponent == 2 else list(map(steps.mul, squares, x.balls))


def gelu(steps: Steps, x: Any, approximate: str = "none") -> Iterator[arb]:
    return map(steps.gelu if approximate == "none" else steps.gelu_tanh, x.balls)


def running_sum(steps: Steps, x: Any, dim: int) -> list[arb]:
    rows = placed(x).movedim(dim, -1)
    sums = [total for row in rows_of(x, dim) for total in itertools.accumulate(row, steps.add)]
    return balls_at(kept(sums, rows.shape).movedim(-1, dim))


def finite(steps: Steps, x: Any, nan: Any = 0.0, posinf: Any = None, neginf: Any = None) -> Any:
    """Replace values that are no finite numbers: an interval of a finite number stays."""
    if not plain(x).isfinite().all():
        raise NotDerivedError("its definition replaces values that are no finite numbers")
    return x.balls


def nearest(steps: Steps, x: Any) -> Iterator[arb]:
    """Round to whole numbers. An interval with a tie in it has both neighbours."""
    return map(partial(stepped, round), x.balls)


def add_product(steps: Steps, x: Any, one: Any, other: Any) -> Iterator[arb]:
    products = each_element("mul")(steps, one, other)
    values = plain(one) * plain(other)
    product = Enclosure.of(values, kept(products, values.shape))
    added: Iterator[arb] = each_element("add")(steps, x, product)
    return added


def add_matrices(steps: Steps, x: Any, one: Any, other: Any) -> Iterator[arb]:
    summands = placed(x).expand(one.shape[0], other.shape[1])
    return map(steps.add, balls_at(summands), matmul(steps, one, other))


def einsum(steps: Steps, equation: str, *operands: Any) -> Iterator[arb]:
    """Sum the products of two tensors over the letters that the result lacks."""
    terms, _, result = equation.replace(" ", "").partition("->")
    letters = terms.split(",")
    if "." in equation or not result or len(letters) != 2:
        raise NotDerivedError(f"its definition sums products as {equation}")
    summed = "".join(dict.fromkeys(each for each in "".join(letters) if each not in result))
    ours, theirs = (
        places_by(result + summed, placed(operand), own)
        for operand, own in zip(operands, letters, strict=True)
    )
    pairs = torch.broadcast_tensors(ours, theirs)  # type: ignore[no-untyped-call]
    rows = [each.flatten(len(result)) if summed else each[..., None] for each in pairs]
    for row, column in zip(*(each.flatten(0, -2) for each in rows), strict=True):
        yield steps.dot(balls_at(row), balls_at(column))


def places_by(order: str, places: Tensor, letters: str) -> Tensor:
    """Return places with a dimension for each letter, in order; of size 1 if it has none."""
    own = [letter for letter in order if letter in letters]
    places = places.permute([letters.index(letter) for letter in own])
    for place, letter in enumerate(order):
        if letter not in letters:
            places = places.unsqueeze(place)
    return places


def convolution(
    steps: Steps,
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Iterator[arb]:
    """Sum the products of a kernel and the elements below it, for a batch of images."""
    over = weight.dim() - 2
    each_dim = [
        list(value) if isinstance(value, (list, tuple)) else [value] * over
        for value in (stride, padding, dilation)
    ]
    if any(isinstance(value, str) for value in each_dim[1]):
        raise NotDerivedError("its definition lets torch choose the padding")
    zero = int(kept([arb(0)], ()))
    ends = [end for size in reversed(each_dim[1]) for end in (size, size)]
    windows = torch.nn.functional.pad(placed(x), ends, value=zero)
    for dim, (step, gap) in enumerate(zip(each_dim[0], each_dim[2], strict=True)):
        extent = (weight.shape[2 + dim] - 1) * gap + 1
        windows = windows.unfold(2 + dim, extent, step)[..., ::gap]
    # [batch, groups, places of the kernel, elements below it]
    batch, places_of_kernel = windows.shape[0], windows.shape[2 : 2 + over]
    windows = windows.reshape(batch, groups, -1, *windows.shape[2:]).movedim(2, 2 + over)
    windows = windows.reshape(batch, groups, places_of_kernel.numel(), -1)
    kernels = placed(weight).reshape(groups, weight.shape[0] // groups, -1)
    summands = None if bias is None else balls_at(placed(bias))
    for image in windows:
        for group, (rows, columns) in enumerate(zip(image, kernels, strict=True)):
            rows_of_group = list(map(balls_at, rows))
            for number, column in enumerate(map(balls_at, columns)):
                products = (steps.dot(row, column) for row in rows_of_group)
                if summands is None:
                    yield from products
                else:
                    summand = summands[group * len(columns) + number]
                    yield from (steps.add(product, summand) for product in products)


def unchanged(steps: Steps, x: Any, *_: Any, **__: Any) -> list[arb]:
    made: list[arb] = x.balls
    return made


def to_float32(steps: Steps, x: Any, *_: Any, **__: Any) -> Any:
    """Convert to the dtype of the steps, or to a half type, which is rounded behind the step."""
    is_exact = x.dtype.itemsize <= 4
    return x.balls if is_exact else map(steps.rounded, x.balls)


MOVING = """
__getitem__ broadcast_to cat chunk clone contiguous detach expand expand_as flatten flip gather
index_copy index_select mT movedim narrow permute repeat repeat_interleave reshape roll select split
split_with_sizes squeeze stack t T transpose unbind unflatten unfold unsqueeze view view_as
"""
ON_ELEMENTS = """
add sub mul div square sqrt rsqrt exp expm1 tanh erf log1p sigmoid silu softplus
"""

CONVERSIONS = ("to", "float", "half", "bfloat16", "type_as")
EXACT = frozenset(
    [
        "neg",
        "__neg__",
        "abs",
        "__abs__",
        "amax",
        "clamp",
        "relu",
        "threshold",
        "round",
        "nan_to_num",
    ]
)
"""Functions that round nothing."""

COMPARISONS = {
    "lt": (operator.lt, operator.ge),
    "le": (operator.le, operator.gt),
    "gt": (operator.gt, operator.le),
    "ge": (operator.ge, operator.lt),
    "eq": (operator.eq, operator.ne),
    "ne": (operator.ne, operator.eq),
}
COMPARISONS |= {f"__{name}__": both for name, both in COMPARISONS.items()}
"""Comparisons, each with the opposite, by name."""

CERTAIN = frozenset(
    [
        "__len__",
        "device",
        "dim",
        "dtype",
        "is_contiguous",
        "is_floating_point",
        "is_nested",
        "ndim",
        "numel",
        "shape",
        "size",
        "stride",
    ]
)
"""Functions of torch whose answer does not depend on values, by name."""

OF_CODES = "its results are codes or places, which jump at a rounding"

INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
TO_INTEGERS = ("to", "int", "long", "short", "char", "byte")

WRITING = re.compile(r"__i[a-z]+__|(?!_).*[a-z0-9]_")
"""Names of functions that write to their argument."""

MADE = frozenset(
    ["new_zeros", "new_ones", "new_full", "new_empty", "zeros_like", "ones_like", "empty_like"]
)
"""Functions of torch that make tensors of known values, by name."""

CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Dtypes with so few numbers that a conversion is a step, not an error of so many parts."""

WHOLE = {
    "scaled_dot_product_attention": "torch computes attention as a whole, and does not say in "
    "which order it sums"
}
"""By name of a function of torch, the reason why nothing can be derived of it."""

WRITES: dict[str, Callable[..., None]] = {
    "__setitem__": write_at,
    "copy_": write_copy,
    "index_copy_": write_along,
}
"""Functions of torch that write values, by name."""

MOVES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(MOVING.split(), moved),
    "embedding": moved_by_ids,
    "pad": moved_by_pad,
    "where": moved_by_where,
    "masked_fill": moved_by_mask,
}
"""Functions of torch that move elements only, by name."""

COMPUTED: dict[str, Computed] = {
    **{name: each_element(name) for name in ON_ELEMENTS.split()},
    **{f"__{name}__": each_element(name) for name in ("add", "sub", "mul")},
    **{f"__r{name}__": each_element(name) for name in ("add", "mul")},
    **dict.fromkeys(("__rsub__", "rsub"), turned("sub")),
    **dict.fromkeys(("__truediv__", "true_divide"), each_element("div")),
    **dict.fromkeys(("__rtruediv__", "__rdiv__"), turned("div")),
    **{name: of_rows(name) for name in ("sum", "mean", "amax")},
    **dict.fromkeys(("matmul", "__matmul__", "bmm", "mm"), matmul),
    **dict.fromkeys(("threshold", "_threshold"), threshold),
    **dict.fromkeys(("neg", "__neg__"), lambda steps, x: [-each for each in x.balls]),
    **dict.fromkeys(("abs", "__abs__"), lambda steps, x: [abs(each) for each in x.balls]),
    **dict.fromkeys(("pow", "__pow__"), power),
    **dict.fromkeys(CONVERSIONS, to_float32),
    "double": unchanged,
    "relu": lambda steps, x, *_, **__: clamp(steps, x, 0.0),
    "clamp": clamp,
    "gelu": gelu,
    "linear": linear,
    "layer_norm": layer_norm,
    "softmax": softmax,
    "round": nearest,
    "nan_to_num": finite,
    "cumsum": running_sum,
    "einsum": einsum,
    "addcmul": add_product,
    "addmm": add_matrices,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), convolution),
}
"""Functions of torch that compute, by name."""

IN_PLACE = frozenset(f"{name}_" for name in COMPUTED)


def bound(spec: OpSpec, dtype: torch.dtype) -> float:
    """Return the largest derived bound of a form, as a share of the tolerance.

    Raises:
        NotDerivedError: the definition has a step that intervals do not take.
    """
    shares = [0.0]
    for variant in spec.variants:
        for size in spec.sizes:
            arguments = spec.arguments(variant, dtype, spec.leads[1], size)
            numbers = [value.numel() for value in tensors(arguments.values())]
            if max(numbers) <= MOST_NUMBERS:
                BALLS.clear()
                shares += shares_of(spec, dtype, arguments)
    return max(shares)


def shares_of(spec: OpSpec, dtype: torch.dtype, arguments: Arguments) -> Iterator[float]:
    """Yield for each result of a call the far end of its interval, as a share of the tolerance."""
    expected = tensors(spec.reference(**in_float64(arguments)))
    atol, rtol = spec.tolerance(dtype)
    for ours, theirs in zip(enclosures(spec, arguments), expected, strict=True):
        rows = zip(ours.balls, numbers_of(ours), numbers_of(theirs), strict=True)
        for ball, value, exact in rows:
            if not ball.contains(arb(value)):
                raise NotDerivedError("torch's own result is outside of the interval")
            far = max(abs(float(ball.upper()) - exact), abs(float(ball.lower()) - exact))
            yield far / (atol + rtol * abs(exact))


def enclosures(spec: OpSpec, arguments: Arguments) -> list[Enclosure]:
    """Return the results of a call on intervals, or the arguments that the form writes to.

    Raises:
        NotDerivedError: the definition has a step that intervals do not take.
    """
    given = dict(arguments)
    for name, value in arguments.items():
        if is_floating(value):
            given[name] = Enclosure.exact(value.clone())
    results = spec.functional.native(**given)
    mutates = spec.functional.mutates
    found: list[Any] = [given[name] for name in mutates] if mutates else tensors(results)
    if not all(isinstance(each, Enclosure) for each in found):
        raise NotDerivedError(OF_CODES)
    return found


def derived(spec: OpSpec) -> dict[str, float] | str:
    """Return the bound of a form by dtype, or the reason why there is none."""
    if torch.float8_e4m3fn in spec.tolerances or torch.float4_e2m1fn_x2 in spec.tolerances:
        return "its results are codes, which jump at a rounding"
    try:
        shares = {dtype: bound(spec, dtype) for dtype in DTYPES if dtype in spec.dtypes}
    except NotDerivedError as error:
        return str(error)
    # Two digits are enough to compare with one.
    return {str(dtype)[6:]: float(f"{share:.2g}") for dtype, share in shares.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the table to this file")
    parser.add_argument("forms", nargs="*", help="names of forms; all if none")
    given = parser.parse_args()
    table = {}
    for form in given.forms or SPECS:
        table[form] = derived(SPECS[form])
        print(form, table[form], flush=True)
    if given.json:
        given.json.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
