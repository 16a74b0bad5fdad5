"""Comparing a model with the same model on native definitions, op by op on the same inputs.

The native model runs. Wherever it calls a module in whose place the other model has an op, the op is called with copies
of the same inputs, so that no op answers for the errors of those before it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from opgraft.base.text import described
from opgraft.binding.comparison import (
    Tolerance,
    arguments_of,
    copied,
    description_of,
    same,
    tensors_within,
)
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.names import op_name_of
from opgraft.errors import InputError
from opgraft.logger import logger
from opgraft.ops.attention.batch import AttentionBatch, attending
from opgraft.ops.attention.cached import CachedAttention
from opgraft.ops.state_space.layer import StateLayer
from opgraft.registry.decision import Provider
from opgraft.registry.state import host_state
from opgraft.testing.catalogue import specs_of, tolerance_of
from opgraft.testing.differences import outcome_of
from torch import Tensor, nn


@dataclass(frozen=True)
class Step:
    """One call of a model; ``batch`` holds the sequences of that call, and where this model keeps what it remembers."""

    call: Callable[[nn.Module], Any]
    batch: AttentionBatch | None = None

    def attending(self) -> AbstractContextManager[None]:
        """Return a scope in which the batch is the current one."""
        return nullcontext() if self.batch is None else attending(self.batch)


Steps = Callable[[nn.Module], Sequence[Step]]
"""Makes the calls of a model, with caches of their own."""


@dataclass(frozen=True)
class Served:
    """An op of the model, and who computes it."""

    op: str
    kernel: str
    provider: Provider
    location: str


@dataclass
class Place:
    """A module of the native model, compared with what stands at the same path in the other one.

    Attributes:
        path: in both models; empty for the whole.
        served: the op there, or the ops within, where the module has no op for a counterpart. None where all of these
            have places of their own, as in the whole.
        calls: how often it was called and compared.
        error: the largest error, as a share of what is allowed; ``None`` where that could not be told.
        reason: how the first result that left its tolerance did so; empty where none has.
    """

    path: str
    served: tuple[Served, ...]
    calls: int = 0
    error: float | None = 0.0
    reason: str = ""


@dataclass(frozen=True)
class Departure:
    """The first call whose result left its tolerance, with all that is needed to make it again.

    Attributes:
        place: where.
        module: what was called.
        args, kwargs: with which it was called.
        batch: the batch at that time, with the pages and states of this module only.
        expected: the results of the native model.
        allowed: absolute and relative tolerance of each.
        inputs: the arguments in words, a line for each.
    """

    place: Place
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    batch: AttentionBatch | None
    expected: Sequence[Tensor]
    allowed: Sequence[Tolerance]
    inputs: Sequence[str]


@dataclass(frozen=True)
class Verification:
    """The outcome: every place that was compared, in the order of the first calls, and the first departure.

    Attributes:
        places: that were compared.
        unreached: paths of ops that the model calls, and the native model has not called anything for.
        departure: the first call that left its tolerance, or ``None``.
    """

    places: Sequence[Place]
    unreached: Sequence[str]
    departure: Departure | None


def verify(native: nn.Module, grafted: nn.Module, steps: Steps) -> Verification:
    """Compare two models that hold the same weights.

    Args:
        native: runs native definitions, or modules without ops.
        grafted: has the ops to be verified. Parts that compute several layers in one call leave it to the layers.
        steps: makes the calls of either.

    Raises:
        InputError: ``grafted`` calls no op, or ``native`` computes nothing but NaN, with which all agrees.
        Exception: of ``grafted``, which raised it where every op is within its tolerance.
    """
    with torch.no_grad():
        places, failure = _places(native, grafted, steps)
        comparer = _Comparer(native, grafted, places)
        with comparer.attached():
            for ours, theirs, whole in zip(
                steps(native), steps(grafted), steps(grafted), strict=True
            ):
                comparer.batch, comparer.whole = theirs.batch, whole.batch
                with ours.attending():
                    computed = tensors_within(ours.call(native))
                if not comparer.found:
                    _expect_numbers(computed)
    if failure and not comparer.found:
        raise failure
    reached = [place for place in places.values() if place.calls]
    unreached = [place.path for place in places.values() if place.served and not place.calls]
    return Verification(
        sorted(reached, key=lambda place: comparer.order.index(place.path)),
        unreached,
        comparer.found,
    )


def _expect_numbers(computed: Sequence[Tensor]) -> None:
    floating = [each for each in computed if each.is_floating_point() and each.numel()]
    if floating and all(bool(each.isnan().all()) for each in floating):
        raise InputError(
            "the native model computes nothing but NaN, with which every result agrees: its weights are damaged, or "
            "what it is called with"
        )


def _places(
    native: nn.Module, grafted: nn.Module, steps: Steps
) -> tuple[dict[str, Place], Exception | None]:
    """Return where the models are compared, and what the grafted one raised.

    That is at each op that is called, or at the nearest module that both have, and last at the model itself.
    """
    called: dict[str, CustomOp] = {}
    failure = None

    def note(path: str) -> Callable[..., None]:
        def hook(module: CustomOp, *_: Any) -> None:
            called[path] = module

        return hook

    with ExitStack() as undo:
        for path, module in grafted.named_modules():
            if isinstance(module, CustomOp):
                undo.callback(module.register_forward_hook(note(path)).remove)
        try:
            for step in steps(grafted):
                with step.attending():
                    step.call(grafted)
        except Exception as error:  # of an op, which is told when that is compared
            logger.debug("the model raised %s, so all of its ops are compared", described(error))
            failure = error
            called = {
                path: module
                for path, module in grafted.named_modules()
                if isinstance(module, CustomOp)
            }
    if not called:
        raise InputError("the model calls no op of opgraft, so there is nothing to compare")
    known = {path for path, _ in native.named_modules()}
    found: dict[str, list[Served]] = {"": []}
    for path, op in called.items():
        found.setdefault(_nearest(path, known), []).append(_served(op))
    return {path: Place(path, tuple(served)) for path, served in found.items()}, failure


def _nearest(path: str, known: set[str]) -> str:
    while path not in known:
        path = path.rpartition(".")[0]
    return path


def _served(op: CustomOp) -> Served:
    binding = op.binding
    name = op_name_of(op.op_class, host_state()) or op.op_class.__qualname__
    return Served(name, binding.kernel_name, binding.provider, binding.kernel.winner.location)


class _Comparer:
    """Calls what stands in the grafted model wherever the native one calls a module, and compares the results."""

    def __init__(self, native: nn.Module, grafted: nn.Module, places: dict[str, Place]) -> None:
        self.native = native
        self.places = places
        self.batch: AttentionBatch | None = None
        self.whole: AttentionBatch | None = None  # which only calls of the whole model write to
        self.found: Departure | None = None
        self.order: list[str] = []
        self._grafted = dict(grafted.named_modules(remove_duplicate=False))
        self._twins = {
            id(module): self._grafted.get(path, module) for path, module in native.named_modules()
        }
        self._given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def attached(self) -> ExitStack:
        """Return a scope in which the native model is watched."""
        undo = ExitStack()
        for path, place in self.places.items():
            module = self.native.get_submodule(path)
            undo.callback(module.register_forward_pre_hook(self._before, with_kwargs=True).remove)
            hook = self._after(place)
            undo.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        return undo

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._given.append(copied((args, kwargs), dict(self._twins)))

    def _after(self, place: Place) -> Callable[..., None]:
        def compare(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            given = self._given.pop()
            written = [
                after for before, after in _pairs(given, (args, kwargs)) if not same(before, after)
            ]
            expected = [*tensors_within(result), *written]
            if place.path not in self.order:
                self.order.append(place.path)
            place.calls += 1
            self._compare(place, module, *given, expected)

        return compare

    def _compare(
        self,
        place: Place,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        expected: Sequence[Tensor],
    ) -> None:
        twin = self._grafted[place.path]
        allowed = [_allowed(twin, each.dtype) for each in expected]
        current = self.batch if place.path else self.whole
        batch = None if current is None or self.found else _batch_of(twin, current)
        taken, named = copied((args, kwargs), {})
        error, reason = outcome_of(twin, taken, named, current, expected, allowed)
        place.error = None if place.error is None or error is None else max(place.error, error)
        if reason and not place.reason:
            place.reason = reason
        if reason and self.found is None:
            kept = [each.clone() for each in expected]  # which the rest of the model may write to
            self.found = Departure(
                place, twin, args, kwargs, batch, kept, allowed, _inputs(module, args, kwargs)
            )


def _allowed(module: nn.Module, dtype: torch.dtype) -> Tolerance:
    """Return by how much a module may differ from the native one.

    Roundings go either way, so those of many ops add up as a random walk does: a module that is made of ``n`` ops with
    specs may differ by the square root of ``n`` times what one may.
    """
    targets = [
        part.binding.replacement.target for part in module.modules() if isinstance(part, CustomOp)
    ]
    absolute, relative = tolerance_of(targets, [dtype.to_real() if dtype.is_complex else dtype])
    times = math.sqrt(max(sum(bool(specs_of(target)) for target in targets), 1))
    return times * absolute, times * relative


def _batch_of(module: nn.Module, batch: AttentionBatch) -> AttentionBatch:
    """Return a batch as a module finds it, with copies of what it may write to."""
    layers = (part for part in module.modules() if isinstance(part, CachedAttention | StateLayer))
    names = {layer.prefix for layer in layers}
    pages = {
        n: dataclasses.replace(p, cache=p.cache.clone())
        for n, p in batch.pages.items()
        if n in names
    }
    states = {
        n: dataclasses.replace(s, tensors=tuple(tensor.clone() for tensor in s.tensors))
        for n, s in batch.states.items()
        if n in names
    }
    return dataclasses.replace(batch, pages=pages, states=states)


def _pairs(before: Any, after: Any) -> list[tuple[Tensor, Tensor]]:
    return list(zip(tensors_within(before), tensors_within(after), strict=True))


def _inputs(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """Describe what a module is called with, a line for each argument by its name."""
    return [
        f"{name}: {description_of(leaf)}"
        for name, leaf in arguments_of(module.forward, args, kwargs).items()
    ]
