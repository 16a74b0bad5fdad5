"""Checks of kernels on drawn inputs, of all sizes and layouts, and in calls one after the other.

Each check raises ``AssertionError`` as its failure, like those of ``checks``.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from time import monotonic, sleep
from typing import Any

import torch
from opgraft.binding.comparison import same
from opgraft.config import OpgraftConfig, set_config
from opgraft.ops.spec import Arguments
from opgraft.testing import checks, inventory
from opgraft.testing.departures import (
    Expected,
    NotTaken,
    departure,
    differing,
    expected,
    shrunk,
)
from opgraft.testing.examples import (
    SIZES,
    THREADS,
    VALUES,
    Example,
    layouts_of,
    other_settings,
    shortest_lead,
    sweep,
    usual_size,
)
from opgraft.testing.kernel_checks import kept_calls
from opgraft.testing.subjects import Trial
from torch import Tensor

MOST_NUMBERS, MOST_IN_BRIEF = 1 << 20, 1 << 17
"""The most numbers in the drawn tensors of an example. A larger example is left out."""

PATIENCE, PATIENCE_IN_BRIEF = 8.0, 3.0
"""Seconds after which further inputs are left out. Some devices compile a kernel for each shape."""

DRAWN, DRAWN_WIDE = 30, 20
"""Random examples of a variant and a dtype: small ones of many rows, and wide ones of few rows."""

TILES = (1, 8, 16, 32, 64, 128)
"""Wide rows have a multiple of such a number of elements: kernels cut rows into tiles of them."""

NARROWEST, WIDEST = 700, 16384
"""The fewest and the most elements in wide rows. A multiple may be just below the fewest."""

NOT_DRAWN = "no random inputs: pip install hypothesis"

CALLS = 12
"""Calls in a row with other values in the same memory."""

LATER = 0.01
"""Seconds in which nothing may change a result any more."""


def check_inputs(
    trial: Trial, over: Callable[[checks.Implementation], checks.Implementation]
) -> tuple[int, str]:
    """Results equal those of the native definition, for inputs of all kinds.

    Args:
        trial: the form, variant and dtype.
        over: wraps each implementation.

    Returns:
        The number of inputs that were compared; what is left out on a slow device or without
        hypothesis, or nothing.
    """
    calls = [over(call) for call in calls_of(trial)]
    # The other implementations share the arithmetic of the first one.
    if trial.subject.brief:
        calls = calls[:1]
    patience = PATIENCE_IN_BRIEF if trial.subject.brief else PATIENCE
    start = monotonic()
    compared = 0
    for tried, example in enumerate(_examples(trial)):
        if monotonic() - start > patience:
            name = trial.variant or trial.form.name
            return compared, f"{name}: only {tried} inputs in {patience:g} s"
        compared += _is_compared(trial, example, calls)
    return compared, NOT_DRAWN if _draws(trial) and not _has_hypothesis() else ""


def calls_of(trial: Trial) -> Iterator[checks.Implementation]:
    """Yield the implementations. A module may take less than its form."""
    if trial.subject.function is not None:
        yield trial.form
    if trial.is_built:
        yield partial(_call_module, trial)


def _call_module(trial: Trial, **arguments: Any) -> Any:
    """Build a module, and call it.

    Raises:
        NotTaken: the native module raises, too, when it is built or called.
    """
    try:
        op, inputs = trial.subject.build(arguments)
        return op(*inputs)
    except Exception as error:
        if _native_module_raises(trial, arguments):
            raise NotTaken from error
        raise


def _native_module_raises(trial: Trial, arguments: Arguments) -> bool:
    own = inventory.choice_here(trial.subject.target).own.name
    try:
        with set_config(OpgraftConfig(providers={trial.subject.op: own})):
            native, inputs = trial.subject.build(arguments)
        native(*inputs)
    # A class may refuse sizes in any way.
    except Exception:
        return True
    return False


def _examples(trial: Trial) -> Iterator[Example]:
    spec = trial.spec
    brief = trial.subject.brief
    is_first = _is_first(trial)
    is_float32 = trial.dtype == torch.float32
    # Other dtypes share most corners of float32.
    if is_float32 or (is_first and not brief):
        yield from sweep(spec, trial.variant, trial.dtype, brief=brief or not is_float32)
    make = partial(Example, trial.variant, trial.dtype)
    rest = shortest_lead(spec)[1:]
    # Enough numbers for a mean error.
    for size in (64, 257) if brief else (64, 257, 2049):
        for wide in {False, trial.dtype.itemsize == 2}:
            yield make((33, *rest), size, wide=wide)
    for values in VALUES:
        yield make((9, *rest), 65, values=values)
    if _draws(trial) and _has_hypothesis():
        yield from _drawn(trial)


def _is_first(trial: Trial) -> bool:
    return trial.variant == trial.subject.variants[0]


def _draws(trial: Trial) -> bool:
    """Return True if random examples belong to the inputs of a trial."""
    return not trial.subject.brief and (trial.dtype == torch.float32 or _is_first(trial))


def _has_hypothesis() -> bool:
    return importlib.util.find_spec("hypothesis") is not None


def _is_compared(trial: Trial, example: Example, calls: list[checks.Implementation]) -> bool:
    """Check one example; return False if the native definition or module does not take it.

    A failure is made smaller and shown as a program.
    """
    most = MOST_IN_BRIEF if trial.subject.brief else MOST_NUMBERS
    wanted = expected(trial.spec, example, most)
    if wanted is None:
        return False
    taken = 0
    for call in calls:
        try:
            told = departure(example, call, wanted)
        except NotTaken:
            continue
        if told:
            raise AssertionError(_told(trial, example, call))
        taken += 1
    return taken > 0


def _told(trial: Trial, example: Example, call: checks.Implementation) -> str:
    """Describe a departure, with a program that makes a small call again."""
    again = partial(departure_of, trial, call)
    small = shrunk(example, again)
    # A kernel that answers differently each time may be right now.
    told = again(small) or "it departed once, and then no more"
    plugin = trial.subject.replacement.provider.name
    return (
        f"{told}. To see that again: import torch; "
        f"from opgraft.testing import Example, again; "
        f"print(again({plugin!r}, {trial.form.name!r}, {small}))"
    )


def departure_of(trial: Trial, call: checks.Implementation, example: Example) -> str:
    """Return how a call departs from the native definition; empty within bounds."""
    wanted = expected(trial.spec, example)
    if wanted is None:
        return ""
    try:
        return departure(example, call, wanted)
    except NotTaken:
        return ""


def _drawn(trial: Trial) -> list[Example]:
    """Return examples that hypothesis draws, each of several corners at once."""
    draw = importlib.import_module("hypothesis.strategies")
    small = draw.sampled_from(SIZES) | draw.integers(1, NARROWEST)

    def multiples(tile: int) -> Any:
        factors = draw.integers(NARROWEST // tile, WIDEST // tile)
        return factors.map(lambda factor: factor * tile)

    wide = draw.sampled_from(TILES).flatmap(multiples)
    return [
        *_generated(trial, DRAWN, draw.integers(1, 20), small),
        *_generated(trial, DRAWN_WIDE, draw.integers(1, 2), wide),
    ]


def _generated(trial: Trial, count: int, extents: Any, sizes: Any) -> list[Example]:
    """Return a number of random examples.

    Args:
        trial: the form, variant and dtype.
        count: of the examples.
        extents: the strategy of hypothesis for a leading dimension.
        sizes: the strategy for the size.
    """
    hypothesis = importlib.import_module("hypothesis")
    draw = importlib.import_module("hypothesis.strategies")
    spec = trial.spec

    def as_many(lead: tuple[int, ...]) -> Any:
        return draw.tuples(*[extents] * len(lead))

    settings_of_call = [(), *other_settings(spec, trial.variant)]
    examples = draw.builds(
        Example,
        variant=draw.just(trial.variant),
        dtype=draw.just(trial.dtype),
        lead=draw.sampled_from(spec.leads).flatmap(as_many),
        size=sizes,
        layout=draw.sampled_from(layouts_of(spec)),
        values=draw.sampled_from(list(VALUES)),
        threads=draw.sampled_from((1, *THREADS)),
        settings=draw.sampled_from(settings_of_call),
        seed=draw.integers(0, 2**32 - 1),
    )
    settings = hypothesis.settings(
        max_examples=count,
        # Only the phase of reuse would read a database.
        database=None,
        deadline=None,
        # ``shrunk`` makes a failed example smaller.
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    found: list[Example] = []

    def collect(example: Example) -> None:
        found.append(example)

    settings(hypothesis.given(examples)(collect))()
    return found


def check_calls(trial: Trial) -> str | None:
    """Each of many calls answers for its own values: in the same memory, and of other sizes."""
    spec = trial.spec
    lead = max((lead for lead in spec.leads if min(lead, default=0) > 0), key=len)
    first = Example(trial.variant, trial.dtype, (5, *lead[1:]), usual_size(spec))
    if expected(spec, first, MOST_IN_BRIEF) is None:
        return "the native definition does not take the drawn inputs"
    for call in kept_calls(trial):
        earlier: list[tuple[Tensor, Tensor]] = []
        for what, arguments in _many_arguments(trial, first):
            earlier += _results_with_copies(trial, call, arguments, what)
        if not trial.subject.brief:
            sleep(LATER)
        if not all(same(now, kept) for now, kept in earlier):
            raise AssertionError(
                f"a result of {trial.form.name} changed after the call: work goes on behind it, or "
                "a later call writes to the same memory"
            )
    return None


def _many_arguments(trial: Trial, first: Example) -> Iterator[tuple[str, Arguments]]:
    """Yield arguments for calls in a row, each with words for a failure."""
    spec = trial.spec
    held = first.arguments(spec)
    for number in range(CALLS):
        values = dataclasses.replace(first, seed=first.seed + number).arguments(spec)
        # Some forms draw the shapes of arguments, too.
        held = _refilled(held, values) if _fit(held, values) else values
        yield f"call {number + 1} with other values in the same memory", held
    _change_one(held)
    yield "a call with one other number", held
    for rows in (17, 5, 2, 2, 5):
        lead = (rows, *first.lead[1:])
        other = dataclasses.replace(first, lead=lead, seed=first.seed + rows)
        wanted = expected(spec, other, MOST_IN_BRIEF)
        if wanted is not None:
            yield f"a call of {rows} after calls of other sizes", wanted.arguments


def _fit(held: Arguments, values: Arguments) -> bool:
    """Return True if all tensors have the shapes of others."""
    return all(
        value.shape == values[name].shape
        for name, value in held.items()
        if isinstance(value, Tensor)
    )


def _refilled(held: Arguments, values: Arguments) -> Arguments:
    """Return other values in the memory of former arguments."""
    found = dict(values)
    is_first = True
    for name, value in held.items():
        if not isinstance(value, Tensor):
            continue
        # Kernels of others write through addresses, which torch's counter of versions does not
        # see. Weights are updated by torch.
        target = value.data if is_first and value.is_floating_point() else value
        target.copy_(values[name])
        found[name] = value
        is_first = is_first and not value.is_floating_point()
    return found


def _change_one(held: Arguments) -> None:
    for value in held.values():
        if isinstance(value, Tensor) and value.is_floating_point() and value.itemsize > 1:
            middle = tuple(extent // 2 for extent in value.shape)
            value.data[middle] += 1.5
            return


def _results_with_copies(
    trial: Trial, call: checks.Implementation, arguments: Arguments, what: str
) -> list[tuple[Tensor, Tensor]]:
    """Check one of many calls; return the results with copies of what they were at once."""
    with torch.no_grad():
        results = checks.results_of(trial.spec, call, arguments)
        # At once: work that goes on behind the call is no result.
        kept = [each.clone() for each in results]
    told = differing(kept, Expected(trial.spec, arguments), trial.dtype)
    if told:
        raise AssertionError(f"{what}: {told}")
    # A result may be an argument, such as a given scale.
    taken = checks.memory_of(value for value in arguments.values() if isinstance(value, Tensor))
    pairs = zip(results, kept, strict=True)
    return [(now, then) for now, then in pairs if not checks.memory_of([now]) & taken]
