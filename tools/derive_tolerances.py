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
from collections.abc import Callable, Iterator, Sequence
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
        """Return a value after one rounding."""
        return x * self.relative + self.tiny

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
        total = arb(0)
        for each in row:
            total = self.rounded(total + each)
        return total

    def mean(self, row: Sequence[arb]) -> arb:
        return self.div(self.sum(row), arb(len(row)))

    def amax(self, row: Sequence[arb]) -> arb:
        largest = row[0]
        for each in row[1:]:
            largest = largest.max(each)
        return largest

    def dot(self, row: Sequence[arb], column: Sequence[arb]) -> arb:
        return self.sum(list(map(self.mul, row, column)))

    def normed(self, row: Sequence[arb], eps: float) -> list[arb]:
        mean = self.mean(list(map(self.square, row)))
        scale = self.rsqrt(self.add(mean, self.number(eps)))
        return [self.mul(each, scale) for each in row]

    def centred(self, row: Sequence[arb]) -> list[arb]:
        mean = self.mean(row)
        return [self.sub(each, mean) for each in row]


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
        values = func(*plain(args), **plain(kwargs))
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__
        if not is_floating(values):
            return values
        if name in MOVES:
            return enclosed(values, MOVES[name](func, args, kwargs))
        if name not in COMPUTED or not isinstance(values, Tensor):
            raise NotDerivedError(f"its definition uses torch's {name}")
        # Torch computes half types in float32, and rounds once more behind the step.
        wide = torch.promote_types(values.dtype, torch.float32)
        made = COMPUTED[name](Steps(wide), *args, **kwargs)
        is_exact = name in EXACT or (args[0].dtype == values.dtype and name in CONVERSIONS)
        if values.dtype != wide and not is_exact:
            made = map(Steps(values.dtype).rounded, made)
        return cls.of(values, kept(made, values.shape))


def kept(balls: Any, shape: Sequence[int]) -> Tensor:
    """Keep intervals, and return their places."""
    start = len(BALLS)
    BALLS.extend(balls)
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


def rows_of(x: Tensor, dim: int = -1) -> Iterator[list[arb]]:
    places = placed(x).movedim(dim, -1)
    return map(balls_at, places.flatten(0, -2))


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
    pairs = [each.expand(*shape, *each.shape[-2:]).flatten(0, -3) for each in (ours, theirs)]
    if not shape:
        pairs = [ours[None], theirs[None]]
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


def norm(steps: Steps, rows: Iterator[list[arb]], eps: float, *operands: Any) -> Iterator[arb]:
    """Norm rows; then apply a weight and a bias, if they are given."""
    weight, bias = (None if each is None else balls_at(placed(each)) for each in operands)
    for row in rows:
        normed = steps.normed(row, eps)
        if weight is not None:
            normed = list(map(steps.mul, normed, weight))
        yield from normed if bias is None else map(steps.add, normed, bias)


def layer_norm(
    steps: Steps, x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Iterator[arb]:
    whole = Enclosure.of(plain(x), placed(x)).flatten(-len(shape))
    return norm(steps, map(steps.centred, rows_of(whole)), eps, weight, bias)


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


def unchanged(steps: Steps, x: Any, *_: Any, **__: Any) -> list[arb]:
    made: list[arb] = x.balls
    return made


def to_float32(steps: Steps, x: Any, *_: Any, **__: Any) -> Any:
    """Convert to the dtype of the steps, or to a half type, which is rounded behind the step."""
    is_wider = x.dtype.itemsize < 4
    return x.balls if is_wider else map(steps.rounded, x.balls)


MOVING = """
__getitem__ broadcast_to cat chunk clone contiguous detach expand expand_as flatten flip gather
index_select mT movedim narrow permute repeat repeat_interleave reshape roll select split
split_with_sizes squeeze stack T transpose unbind unflatten unsqueeze view view_as
"""
ON_ELEMENTS = """
add sub mul div square sqrt rsqrt exp expm1 tanh erf log1p sigmoid silu softplus
"""

CONVERSIONS = ("to", "float", "half", "bfloat16", "type_as")
EXACT = frozenset(("neg", "__neg__", "abs", "__abs__", "amax", "clamp", "relu", "threshold"))
"""Functions that round nothing."""

MOVES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(MOVING.split(), moved),
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
}
"""Functions of torch that compute, by name."""


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
    given = dict(arguments)
    for name, value in arguments.items():
        if is_floating(value):
            given[name] = Enclosure.exact(value)
    found = tensors(spec.functional.native(**given))
    atol, rtol = spec.tolerance(dtype)
    for ours, theirs in zip(found, expected, strict=True):
        if not isinstance(ours, Enclosure):
            raise NotDerivedError("its results are codes or places, which jump at a rounding")
        rows = zip(ours.balls, numbers_of(ours), numbers_of(theirs), strict=True)
        for ball, value, exact in rows:
            if not ball.contains(arb(value)):
                raise NotDerivedError("torch's own result is outside of the interval")
            far = max(abs(float(ball.upper()) - exact), abs(float(ball.lower()) - exact))
            yield far / (atol + rtol * abs(exact))


def derived(spec: OpSpec) -> dict[str, float] | str:
    """Return the bound of a form by dtype, or the reason why there is none."""
    if spec.functional.mutates:
        return "it writes to its arguments"
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
