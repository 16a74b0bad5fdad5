"""Time the candidates of ops against each other, for ``custom_ops`` ``auto``."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from opgraft.binding.measurements import (
    MARGIN,
    LeftOut,
    OpMeasurement,
    TimedChoice,
    subject_of,
    versions_here,
)
from opgraft.binding.names import op_name_of
from opgraft.binding.provenance import exits_as_errors, kernels_told_when_late, own_words
from opgraft.binding.specialisation import Binding, bind
from opgraft.config import CompilationConfig, OpgraftConfig, set_config
from opgraft.errors import ConflictError, InputError, close_matches
from opgraft.ops.spec import OpSpec
from opgraft.plugins.discovery import discover
from opgraft.plugins.selection import current_platform
from opgraft.registry.state import host_state
from opgraft.testing.catalogue import SPECS
from opgraft.testing.checks import by_module, check_values
from opgraft.testing.replaying import replayable
from opgraft.testing.shapes import ShapeRecord
from opgraft.testing.side_by_side import seconds_of

ROWS = (1, 16, 512)
"""Rows of inputs, if an op takes rows: a token of one sequence, of sixteen, and a prompt."""

_ROUNDS = 5


@dataclass(frozen=True)
class Race:
    """An op with several candidates here.

    Attributes:
        name: of the op; for a variant, the name of the class.
        op: the name in settings.
        candidates: the choices of ``providers``, each with the binding.
        usual: the choice without a setting; ``None`` for a conflict.
        specs: inputs of the functional forms. A form without a module counts if candidates bring
            different functions for the form.
    """

    name: str
    op: str
    candidates: Mapping[str, Binding]
    usual: str | None
    specs: tuple[OpSpec, ...]


@dataclass(frozen=True)
class RaceResult:
    """The result of a race.

    Attributes:
        measured: ``None`` if no candidate ran.
        left_out: by choice, why a candidate did not count.
    """

    measured: OpMeasurement | None
    left_out: Mapping[str, str]


def races(names: Sequence[str] = ()) -> tuple[list[Race], dict[str, str]]:
    """Return the ops and variants to be timed, and by name why others are not.

    Args:
        names: of ops or classes; by default all ops with a choice.

    Raises:
        InputError: a name is neither an op nor a class of ops.
        ConfigError: a setting names an unknown op or provider.
    """
    state = host_state()
    for name in names:
        if state.registry.find_target(name) is None:
            matches = close_matches(name, state.registry.target_names())
            raise InputError(f"no op is called {name!r}: {matches}")
    found = []
    others = dict.fromkeys(names, "no functional form has inputs for it")
    for cls, specs in _specs_by_class().items():
        op = op_name_of(cls, state) or ""
        asked = {op, subject_of(cls, op), cls.__qualname__} & set(names)
        if not op or (names and not asked):
            continue
        race = _race(cls, op, specs)
        for name in asked:
            others.pop(name, None)
        if len(race.candidates) > 1:
            found.append(race)
        elif names:
            others[race.name] = f"{', '.join(race.candidates)} is the only candidate here"
    return sorted(found, key=lambda race: race.name), others


def _specs_by_class() -> Mapping[type, Sequence[OpSpec]]:
    """Return the specs of forms that can be timed, by op class."""
    found: dict[type, list[OpSpec]] = {}
    for spec in SPECS.values():
        target = host_state().registry.find_target(spec.functional.op)
        # Called again and again, a form that writes to arguments computes with ever larger values.
        if target and not spec.functional.mutates:
            found.setdefault(target, []).append(spec)
    return found


def _race(cls: Any, op: str, specs: Sequence[OpSpec]) -> Race:
    own = discover().provider_of(cls.__module__)
    bound: dict[str, Binding] = {}
    for choice in (*versions_here(cls, own, host_state().active, current_platform()), own.name):
        with chosen(op, choice):
            binding = bind(cls)
        # Two choices may bind the same kernel, such as the op's own and a plugin that steps aside.
        if _kernel(binding) not in map(_kernel, bound.values()):
            bound[choice] = binding
    usual = None
    with contextlib.suppress(ConflictError), _plainly():  # of two plugins of one priority
        plain = _kernel(bind(cls))
        usual = next((choice for choice in bound if _kernel(bound[choice]) == plain), None)
    differing = []
    # A form without a module and with one function is the same for all candidates.
    for spec in specs:
        name = spec.functional.name
        functions = {binding.kernel.winner.functional(name) for binding in bound.values()}
        if spec.module or len(functions) > 1:
            differing.append(spec)
    return Race(subject_of(cls, op), op, bound, usual, tuple(differing))


def _kernel(binding: Binding) -> tuple[Any, ...]:
    return binding.replacement.cls, binding.kernel.winner


def _plainly(**settings: Any) -> contextlib.AbstractContextManager[None]:
    compilation = CompilationConfig(custom_ops=("all",))
    return set_config(OpgraftConfig(compilation_config=compilation, **settings))


def chosen(op: str, choice: str) -> contextlib.AbstractContextManager[None]:
    """Return a scope with a provider for one op; other ops run as they do without settings."""
    return _plainly(providers={op: choice})


def shapes(spec: OpSpec) -> list[tuple[tuple[int, ...], int]]:
    """Return realistic leading dimensions and sizes; no native definition takes minutes."""
    if len(spec.leads[0]) != 1:
        return list(spec.large)
    largest = max(math.prod(lead) for lead, _ in spec.large)
    size = max(size for _, size in spec.large)
    # Kernels for vectors prefer whole multiples, as models have.
    if size > 64:
        size -= size % 64
    return [((rows,), size) for rows in ROWS if rows <= 8 * largest]


Case = tuple[str, OpSpec, tuple[int, ...], int]
"""Words for a shape, the spec, and the leading dimensions and the size of the inputs."""


def _cases(spec: OpSpec, record: ShapeRecord | None) -> Iterator[Case]:
    """Yield the inputs to time: realistic ones of the spec, or those of a record."""
    if record is None:
        for lead, size in shapes(spec):
            form = "x".join(map(str, (*lead, size)))
            yield f"{spec.functional.name} {form}", spec, lead, size
        return
    for replayed, obstacle in replayable(record, spec, ROWS[-1]):
        if obstacle:
            continue
        for tokens in ROWS if replayed.is_per_token else ROWS[:1]:
            inputs = replayed.at(tokens)
            if not replayed.builds():
                inputs = dataclasses.replace(inputs, module=None)
            yield replayed.words(tokens), inputs, (tokens,), 1


def run(
    race: Race,
    dtypes: Iterable[torch.dtype],
    seconds: float,
    record: ShapeRecord | None = None,
) -> RaceResult:
    """Time the candidates of an op in turns, on each shape, so that all meet the same neighbours.

    A candidate is left out if a call raises, or if results on small inputs are not those of the
    reference.

    Args:
        race: the op with the candidates.
        dtypes: of the inputs; dtypes that the op does not take are passed over.
        seconds: the time for a candidate at a shape, about.
        record: calls of real models to time, in place of the shapes of the specs.
    """
    trials = [_Contender(race.op, choice) for choice in race.candidates]
    kinds = []
    for spec, dtype in itertools.product(race.specs, dtypes):
        if dtype in spec.dtypes:
            kinds.append((spec, dtype))
    # All candidates are checked before any is timed.
    for candidate, (spec, dtype) in itertools.product(trials, kinds):
        case = f"{spec.functional.name} {_words(dtype)}"
        check = functools.partial(candidate.expect_right, spec, dtype)
        candidate.attempt(case, check)
    for spec, dtype in kinds:
        for words, inputs, lead, size in _cases(spec, record):
            _time(trials, f"{words} {_words(dtype)}", (inputs, dtype, lead, size), seconds)
    return _outcome(race, trials)


def _outcome(race: Race, trials: Sequence[_Contender]) -> RaceResult:
    """Return the result of a race after all rounds."""
    left_out = {}
    times = {}
    for candidate in trials:
        if candidate.fault:
            left_out[candidate.choice] = candidate.fault
        # Without inputs in any dtype there are no times.
        elif candidate.times:
            times[candidate.choice] = candidate.times
    measured = best_of(race, times, left_out) if times else None
    return RaceResult(measured, left_out)


def _words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _time(trials: Sequence[_Contender], case: str, inputs: Any, seconds: float) -> None:
    """Time candidates in turns on inputs of one shape."""
    for candidate in trials:
        prepare = functools.partial(candidate.prepare, *inputs)
        candidate.attempt(case, prepare)
    # Rounds in turns: a slow phase of the machine meets every candidate.
    for _ in range(_ROUNDS):
        for candidate in trials:
            go = functools.partial(candidate.go, seconds / _ROUNDS)
            candidate.attempt(case, go)
    for candidate in trials:
        finish = functools.partial(candidate.finish, case)
        candidate.attempt(case, finish)


class _Contender:
    """A candidate of an op in a race.

    Attributes:
        choice: the choice of ``providers``.
        fault: why the candidate is left out; empty if it is not.
        times: the seconds of a call by shape.
    """

    def __init__(self, op: str, choice: str) -> None:
        self.op = op
        self.choice = choice
        self.fault = ""
        self.times: dict[str, float] = {}
        self._call: Callable[[], object] = bool
        self._once = 0.0
        self._taken: list[float] = []

    def attempt(self, case: str, step: Callable[[], str | None]) -> None:
        """Take a step of the race; a fault or an exception of the step leaves the candidate out."""
        if self.fault:
            return
        try:
            with kernels_told_when_late(), exits_as_errors():
                fault = step()
        except Exception as error:  # a kernel of others
            fault = f"it raised {own_words(error)}"
        if fault:
            self.fault = f"at {case} {fault}"

    def expect_right(self, spec: OpSpec, dtype: torch.dtype) -> str | None:
        """Compare with the reference in float64, on a small input and an empty one."""
        placed = dataclasses.replace(spec, device=current_platform().device_type)
        call = by_module(placed) if placed.module else placed.functional
        variant = next(iter(placed.variants))
        try:
            with chosen(self.op, self.choice):
                check_values(placed, variant, dtype, call, brief=True)
        except AssertionError as error:
            return f"its results are wrong: {error}"
        return None

    def prepare(self, spec: OpSpec, dtype: torch.dtype, lead: Sequence[int], size: int) -> None:
        """Draw inputs, and time one call."""
        placed = dataclasses.replace(spec, device=current_platform().device_type)
        # Drawn outside of inference mode, as a model's weights are: kernels keep copies of weights
        # that nobody writes to.
        arguments = placed.arguments(next(iter(spec.variants)), dtype, lead, size)
        self._call = self._of_arguments(placed, arguments)
        self._taken = []
        self._seconds(1)
        self._once = self._seconds(1)

    def _of_arguments(self, spec: OpSpec, arguments: Any) -> Callable[[], object]:
        """Return a call of the op's module, as models call the module, or of the form."""
        if spec.module is None:
            return functools.partial(spec.functional, **arguments)
        with chosen(self.op, self.choice), torch.device(spec.device):
            module, inputs = spec.module(**arguments)
        module.requires_grad_(False)
        if isinstance(inputs, dict):
            return functools.partial(module, **inputs)
        return functools.partial(module, *inputs)

    def go(self, seconds: float) -> None:
        """Time as many calls as fit into some seconds, and at least one."""
        number = max(1, int(seconds / self._once))
        self._taken.append(self._seconds(number))

    def finish(self, case: str) -> None:
        """Keep the shortest time: the work of other processes only ever adds."""
        self.times[case] = min(self._taken)

    def _seconds(self, number: int) -> float:
        # The first call in a scope decides which kernel runs, and is not timed.
        with chosen(self.op, self.choice), torch.inference_mode():
            return seconds_of(self._call, number)


def best_of(
    race: Race, times: Mapping[str, Mapping[str, float]], left_out: Mapping[str, str]
) -> OpMeasurement:
    """Choose the usual candidate, unless another one is clearly faster.

    The record also has the candidates left out, with reasons: the record holds for their versions,
    too.
    """
    rows = []
    for choice, seconds in times.items():
        binding = race.candidates[choice]
        rows.append(TimedChoice(choice, binding.provider, binding.kernel_name, seconds))
    best = min(rows, key=lambda row: row.mean)
    usual = next((row for row in rows if row.choice == race.usual), best)
    # A change of kernel for the noise of a clock would make results differ in vain.
    winner = best if best.mean < MARGIN * usual.mean else usual
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    others = [
        LeftOut(choice, race.candidates[choice].provider, why) for choice, why in left_out.items()
    ]
    return OpMeasurement(winner.choice, torch.get_num_threads(), when, tuple(rows), tuple(others))
