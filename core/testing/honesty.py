"""A check that a kernel computes alike unobserved, and leaves references and clocks alone."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextvars import copy_context
from functools import partial
from itertools import starmap
from types import CodeType, FrameType
from typing import Any

import torch
from opgraft.base.text import printable
from opgraft.binding import comparison
from opgraft.binding.custom_op import PluggableLayer
from opgraft.ops import spec as specs
from opgraft.ops.spec import Arguments, tensors
from opgraft.testing import checks, departures, examples, kernel_checks, side_by_side
from opgraft.testing.catalogue import SPECS
from opgraft.testing.subjects import Subject, Trial

WATCHED = (
    time,
    torch.testing,
    comparison,
    specs,
    checks,
    departures,
    examples,
    kernel_checks,
    side_by_side,
)
"""Modules whose functions measure and compare."""

OF_TORCH = ("allclose", "equal", "isclose")
OF_SPECS = ("functional", "inputs", "reference", "module", "tolerances")
OF_FORMS = ("native", "fake")


def _read() -> Mapping[str, Any]:
    """Return what a plugin must not replace, by name."""
    found: dict[str, Any] = {}
    for module in WATCHED:
        for name, value in vars(module).items():
            if callable(value):
                found[f"{module.__name__}.{name}"] = value
    for name in OF_TORCH:
        found[f"torch.{name}"] = getattr(torch, name)
    for form, spec in SPECS.items():
        for name in OF_SPECS:
            found[f"the {name} of the spec of {form}"] = getattr(spec, name)
        for name in OF_FORMS:
            found[f"the {name} of the form {form}"] = getattr(spec.functional, name)
    return found


_BEFORE = _read()
"""As it was before any plugin was loaded."""

_REFERENCES = frozenset(
    code for spec in SPECS.values() if (code := getattr(spec.reference, "__code__", None))
)


def replaced() -> list[str]:
    """Return in words what is replaced since this module was imported."""
    now = _read()
    told = []
    for name, value in _BEFORE.items():
        if now.get(name) is not value:
            told.append(printable(f"{name} is {now.get(name)!r}"))
    return told


def check_honesty(trial: Trial) -> str | None:
    """Values are the same unobserved, and no reference, clock or comparison is touched.

    Returns:
        A reason why nothing was checked, or ``None``.
    """
    subject = trial.subject
    told = replaced()
    if told:
        raise AssertionError(f"since the plugin was loaded, {'; '.join(told)}")
    winner = kernel_checks.own_winner(subject)
    if winner is None or issubclass(subject.target, PluggableLayer):
        return "it has no kernel of its own"
    for call in trial.calls:
        _expect_unobserved(trial, call, trial.small())
    # A kernel with the mark says when it runs other code.
    if winner.fallback is None and all(_fallbacks(subject)):
        return (
            "every call runs the native definition, so nothing else was checked: mark a kernel "
            "that cannot run here with @opgraft.needs"
        )
    return None


def _fallbacks(subject: Subject) -> Iterator[bool]:
    """Yield for calls of all dtypes and variants whether they run the native definition."""
    # float32 first: most kernels take it, and one call without the definition is enough.
    for dtype in sorted(subject.dtypes, key=lambda dtype: dtype != torch.float32):
        for variant in subject.variants:
            trial = Trial(subject, variant, dtype)
            yield from _fallbacks_of(trial)


def _fallbacks_of(trial: Trial) -> Iterator[bool]:
    spec = trial.spec
    cases = [(spec.leads[1], size) for size in spec.sizes]
    # A kernel may leave small inputs to the native definition. The spec of the short form has no
    # others.
    for lead, size in (*cases, *SPECS[trial.form.name].large):
        arguments = trial.arguments(lead, size)
        for call in trial.calls:
            yield _is_native(trial, call, arguments)


def _is_native(trial: Trial, call: checks.Implementation, arguments: Arguments) -> bool:
    """Return True if a call runs the native definition, and tries no operator of the plugin.

    A kernel may try its operator, and run the native definition if the operator refuses.

    Raises:
        AssertionError: the call runs the reference of a proof.
    """
    seen: set[CodeType] = set()
    tried: list[object] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        seen.add(frame.f_code)
        caller = frame.f_locals.get("self")
        if event == "call" and kernel_checks.is_operator_of_plugin(caller):
            tried.append(caller)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        with torch.no_grad():
            checks.results_of(trial.spec, call, arguments)
    finally:
        sys.setprofile(before)
    if seen & _REFERENCES:
        raise AssertionError(
            f"{trial.form.name} runs the reference of a proof, which it is compared with"
        )
    return trial.form.native.__code__ in seen and not tried


def _expect_unobserved(trial: Trial, call: checks.Implementation, arguments: Arguments) -> None:
    """Compare with a call in a thread, whose stack has no function of this kit."""
    run: Any = trial.form
    given: tuple[Any, ...] = ()
    named = dict(arguments)
    if call is not trial.form:
        run, given = trial.subject.build(arguments)
        named = {}
    elif trial.form.mutates:
        return
    with torch.no_grad():
        here = tensors(run(*given, **named))
    found: list[Any] = []
    # The thread runs a built-in, which calls torch's wrapper, which calls the op.
    bare = partial(torch.no_grad()(run.__call__), **named)
    calls = starmap(bare, [given])
    # Settings are context variables, which a new thread does not have.
    thread = threading.Thread(target=copy_context().run, args=(found.extend, calls))
    thread.start()
    thread.join()
    if not found:
        raise AssertionError(f"{trial.form.name} raised in a bare thread, and not here")
    what = f"a call of {trial.form.name} in a bare thread"
    side_by_side.expect_same(what, tensors(found[0]), here)
