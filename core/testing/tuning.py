"""Timing the candidates of ops against each other, and keeping what was found for ``custom_ops`` ``auto``."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from opgraft.base.files import replace_file
from opgraft.base.text import described
from opgraft.binding.measurements import (
    MARGIN,
    LeftOut,
    Measured,
    Profile,
    Timed,
    read_profile,
    setup_here,
    subject_of,
    versions_here,
    written,
)
from opgraft.binding.names import op_name_of
from opgraft.binding.specialisation import Binding, bind
from opgraft.config import CompilationConfig, OpgraftConfig, set_config
from opgraft.errors import ConflictError, InputError, close_matches
from opgraft.ops.spec import OpSpec
from opgraft.plugins.discovery import discover
from opgraft.plugins.selection import current_platform
from opgraft.registry.state import host_state
from opgraft.testing.catalogue import SPECS
from opgraft.testing.checks import by_module, check_values

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that may be timed."""

ROWS = (1, 16, 512)
"""Rows of the inputs, where an op takes rows: a token of one sequence, of sixteen, and a prompt."""

_ROUNDS = 5
_LOCKED_FOR = 10.0
"""Seconds for which another process is waited for that writes the file."""


@dataclass(frozen=True)
class Race:
    """An op of which several candidates can run here.

    Attributes:
        name: of the op; of a variant, that of its class.
        op: the name by which settings know it.
        candidates: the choices of ``providers``, each with what it binds.
        usual: the one that runs without a choice, ``None`` where that is a conflict.
        specs: inputs of its functional forms, of those without a module where the candidates bring other functions.
    """

    name: str
    op: str
    candidates: Mapping[str, Binding]
    usual: str | None
    specs: tuple[OpSpec, ...]


@dataclass(frozen=True)
class Outcome:
    """The result of a race: the measurement, ``None`` where no candidate ran, and what speaks against others."""

    measured: Measured | None
    left_out: Mapping[str, str]


def races(names: Sequence[str] = ()) -> tuple[list[Race], dict[str, str]]:
    """Return the ops and variants to be timed, by default all that have a choice, and why others of ``names`` are not.

    Raises:
        InputError: one of ``names`` is neither an op nor a class of ops.
        ConfigError: a setting names an op or a provider that is not there.
    """
    state = host_state()
    unknown = next((name for name in names if state.registry.find_target(name) is None), None)
    if unknown:
        raise InputError(
            f"no op is called {unknown!r}: {close_matches(unknown, state.registry.target_names())}"
        )
    forms: dict[type, list[OpSpec]] = {}
    for spec in SPECS.values():
        target = state.registry.find_target(spec.functional.op)
        if (
            target and not spec.functional.mutates
        ):  # called again and again, it would compute with ever larger values
            forms.setdefault(target, []).append(spec)
    found, others = [], dict.fromkeys(names, "no functional form has inputs for it")
    for cls, specs in forms.items():
        op = op_name_of(cls, state) or ""
        asked = {op, subject_of(cls, op), cls.__qualname__} & set(names)
        if op and (asked or not names):
            race = _race(cls, op, specs)
            others = {name: reason for name, reason in others.items() if name not in asked}
            if len(race.candidates) > 1:
                found.append(race)
            elif names:
                others[race.name] = f"{', '.join(race.candidates)} is the only candidate here"
    return sorted(found, key=lambda race: race.name), others


def _race(cls: Any, op: str, specs: Sequence[OpSpec]) -> Race:
    own = discover().provider_of(cls.__module__)
    bound: dict[str, Binding] = {}
    for choice in (*versions_here(cls, own, host_state().active, current_platform()), own.name):
        with chosen(op, choice):
            binding = bind(cls)
        if _what(binding) not in map(_what, bound.values()):
            bound[choice] = binding
    try:
        with _plainly():
            plain = _what(bind(cls))
    except ConflictError:  # two plugins of one priority
        plain = None
    usual = next((choice for choice, binding in bound.items() if _what(binding) == plain), None)
    differing = (
        spec
        for spec in specs
        if spec.module or len({_function(spec, each) for each in bound.values()}) > 1
    )
    return Race(subject_of(cls, op), op, bound, usual, tuple(differing))


def _function(spec: OpSpec, binding: Binding) -> Callable[..., Any] | None:
    return binding.kernel.winner.functional(spec.functional.name)


def _what(binding: Binding) -> tuple[Any, ...]:
    return binding.replacement.cls, binding.kernel.winner


def _plainly(**settings: Any) -> contextlib.AbstractContextManager[None]:
    return set_config(
        OpgraftConfig(compilation_config=CompilationConfig(custom_ops=("all",)), **settings)
    )


def chosen(op: str, choice: str) -> contextlib.AbstractContextManager[None]:
    """Return a scope in which an op has the provider of that name, and others what they have without settings."""
    return _plainly(providers={op: choice})


def shapes(spec: OpSpec) -> list[tuple[tuple[int, ...], int]]:
    """Return leading dimensions and sizes that are realistic, and of which no native definition takes minutes."""
    if len(spec.leads[0]) != 1:
        return list(spec.large)
    most, size = (
        max((math.prod(lead), size) for lead, size in spec.large)[0],
        max(size for _, size in spec.large),
    )
    return [((rows,), size - size % 64 if size > 64 else size) for rows in ROWS if rows <= 8 * most]


def run(race: Race, dtypes: Iterable[torch.dtype], seconds: float) -> Outcome:
    """Time the candidates of an op in turns, on each shape, so that all meet the same neighbours.

    A candidate that raises is left out, and so is one whose results on small inputs are not those of the reference.

    Args:
        dtypes: of the inputs; those that an op does not take are passed over.
        seconds: for which a candidate is timed at a shape, about.
    """
    times: dict[str, dict[str, float]] = {choice: {} for choice in race.candidates}
    left_out: dict[str, str] = {}
    kinds = [(spec, dtype) for spec in race.specs for dtype in dtypes if dtype in spec.dtypes]
    for choice, (spec, dtype) in itertools.product(race.candidates, kinds):
        with _unless_it_raises(choice, f"{spec.functional.name} {_words(dtype)}", left_out):
            _expect_right(race.op, choice, spec, dtype)
    for spec, dtype, lead, size in ((*kind, *shape) for kind in kinds for shape in shapes(kind[0])):
        name = f"{spec.functional.name} {'x'.join(map(str, (*lead, size)))} {_words(dtype)}"
        sides = {}
        for choice in (choice for choice in race.candidates if choice not in left_out):
            with _unless_it_raises(choice, name, left_out):
                sides[choice] = _Side(
                    race.op, choice, _call(race.op, choice, spec, dtype, lead, size)
                )
        for _ in range(_ROUNDS):
            for choice, side in sides.items():
                if choice not in left_out:
                    with _unless_it_raises(choice, name, left_out):
                        side.go(seconds / _ROUNDS)
        for choice, side in sides.items():
            if choice not in left_out:
                times[choice][name] = min(side.taken)  # another process's work only ever adds
    ran = {choice: found for choice, found in times.items() if choice not in left_out and found}
    return Outcome(best_of(race, ran, left_out) if ran else None, left_out)


def _words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextlib.contextmanager
def _unless_it_raises(choice: str, case: str, left_out: dict[str, str]) -> Iterator[None]:
    """Leave a candidate out, with the reason, where what runs in this scope raises."""
    try:
        yield
    except Differs as error:
        left_out[choice] = f"at {case} its results are wrong: {error}"
    except Exception as error:  # a kernel of others
        left_out[choice] = f"at {case} it raised {described(error)}"


class Differs(Exception):  # noqa: N818 -- an outcome of a race
    """A kernel computes something else than its op."""


def _expect_right(op: str, choice: str, spec: OpSpec, dtype: torch.dtype) -> None:
    """Compare a candidate with the reference in float64, on a small input and an empty one.

    Raises:
        Differs: they differ.
    """
    placed = dataclasses.replace(spec, device=current_platform().device_type)
    call = by_module(placed) if placed.module else placed.functional
    try:
        with chosen(op, choice):
            check_values(placed, next(iter(placed.variants)), dtype, call, brief=True)
    except AssertionError as error:
        raise Differs(str(error)) from error


def best_of(
    race: Race, times: Mapping[str, Mapping[str, float]], left_out: Mapping[str, str]
) -> Measured:
    """Choose among candidates by their times: what would run anyway, unless another one is clearly faster.

    Those that raised are written down with their reasons, as what was measured holds for them too.
    """
    bound = race.candidates
    rows = [
        Timed(each, bound[each].provider, bound[each].kernel_name, times[each]) for each in times
    ]
    best = min(rows, key=lambda row: row.mean)
    usual = next((row for row in rows if row.choice == race.usual), best)
    winner = best if best.mean < MARGIN * usual.mean else usual
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    others = tuple(LeftOut(choice, bound[choice].provider, why) for choice, why in left_out.items())
    return Measured(winner.choice, torch.get_num_threads(), when, tuple(rows), others)


def _call(
    op: str, choice: str, spec: OpSpec, dtype: torch.dtype, lead: Sequence[int], size: int
) -> Callable[[], object]:
    """Return a call of an op as a candidate computes it: of its module where there is one, as models call that."""
    placed = dataclasses.replace(spec, device=current_platform().device_type)
    # Drawn outside of inference mode, as a model's weights are: kernels keep copies of those that nobody writes to.
    arguments = placed.arguments(next(iter(spec.variants)), dtype, lead, size)
    if spec.module is None:
        return functools.partial(spec.functional, **arguments)
    with chosen(op, choice), torch.device(placed.device):
        module, inputs = spec.module(**arguments)
    module.requires_grad_(False)
    return (
        functools.partial(module, **inputs)
        if isinstance(inputs, dict)
        else functools.partial(module, *inputs)
    )


class _Side:
    """A candidate at a shape, and the seconds of a call in each round."""

    def __init__(self, op: str, choice: str, call: Callable[[], object]) -> None:
        self.op = op
        self.choice = choice
        self.call = call
        self.taken: list[float] = []
        self._seconds(1)
        self.once = self._seconds(1)

    def go(self, seconds: float) -> None:
        """Time as many calls as fit into so many seconds, and one at least."""
        self.taken.append(self._seconds(max(1, int(seconds / self.once))))

    def _seconds(self, number: int) -> float:
        wait = current_platform().synchronize
        with chosen(self.op, self.choice), torch.inference_mode():
            self.call()  # in this scope nothing is decided yet
            wait()
            start = time.perf_counter()
            for _ in range(number):
                self.call()
            wait()
            return (time.perf_counter() - start) / number


class ProfileFile:
    """A file of measurements that this process adds to, as others may at the same time.

    Raises:
        InputError: it cannot be read, as it holds something else, or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.setup = setup_here()
        self.add({})

    def add(self, rows: Mapping[str, Measured]) -> None:
        """Add measurements of this machine to those that the file has, which those of other versions give way to."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _locked(self.path):
                profile = read_profile(self.path) if self.path.exists() else {}
                kept = {
                    setup: ops
                    for setup, ops in profile.items()
                    if setup.machine != self.setup.machine
                }
                merged: Profile = {**kept, self.setup: {**profile.get(self.setup, {}), **rows}}
                replace_file(self.path, written(merged), 0o600)
        except OSError as error:
            raise InputError(
                f"the measurements {self.path} cannot be written: {error.strerror or described(error)}: name another "
                "file by compilation_config.tuning_file"
            ) from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file in one beside it, which the system lets go of when the process ends in any way."""
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    try:
        end = time.monotonic() + _LOCKED_FOR
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise TimeoutError(
                        errno.ETIMEDOUT,
                        f"another process has held {path}.lock for {_LOCKED_FOR:g} s",
                    ) from None
                time.sleep(0.01)
        yield
    finally:
        os.close(lock)
