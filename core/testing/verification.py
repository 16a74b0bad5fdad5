"""Compare a model with the same model on native definitions, op by op on the same inputs.

The native model runs. If the other model has an op at the place of a called module, the op is
called with copies of the same inputs: no op answers for the errors of earlier ops.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from opgraft.base.log import logger
from opgraft.base.text import described
from opgraft.binding.comparison import (
    Differences,
    Tolerance,
    arguments_of,
    compare,
    copied,
    description_of,
    same,
    tensors_within,
)
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.names import op_name_of
from opgraft.binding.provenance import exits_as_errors, own_words
from opgraft.errors import InputError
from opgraft.ops.attention.batch import AttentionBatch, attending
from opgraft.ops.attention.cached import CachedAttention
from opgraft.ops.state_space.layer import StateLayer
from opgraft.registry.decision import Provider
from opgraft.registry.state import host_state
from opgraft.testing.catalogue import specs_of, tolerance_of
from torch import Tensor, nn


@dataclass(frozen=True)
class VerifiedStep:
    """One call of a model. ``batch`` has the sequences of the call, and the model's own caches."""

    call: Callable[[nn.Module], Any]
    batch: AttentionBatch | None = None

    def attending(self) -> AbstractContextManager[None]:
        """Return a scope that makes the batch the current one."""
        return _attending(self.batch)


def _attending(batch: AttentionBatch | None) -> AbstractContextManager[None]:
    return nullcontext() if batch is None else attending(batch)


Steps = Callable[[nn.Module], Sequence[VerifiedStep]]
"""Makes the calls of a model, with caches of the model's own."""


@dataclass(frozen=True)
class ServedOp:
    """An op of the model, with the kernel and the provider."""

    op: str
    kernel: str
    provider: Provider
    location: str


@dataclass
class ComparedModule:
    """A module of the native model, compared with the module at the same path of the other model.

    Attributes:
        path: in both models; empty for the whole model.
        served: the op at the path, or the ops within a module without a counterpart. Empty if each
            op within has a place of its own, as in the whole model.
        calls: the number of compared calls.
        error: the largest error, as a share of the tolerance; ``None`` without a number.
        reason: the first difference beyond the tolerance, in words; empty if there is none.
    """

    path: str
    served: tuple[ServedOp, ...]
    calls: int = 0
    error: float | None = 0.0
    reason: str = ""

    def add(self, found: Differences) -> None:
        """Take note of a call's differences."""
        if self.error is not None:
            self.error = None if found.error is None else max(self.error, found.error)
        if found.reasons and not self.reason:
            self.reason = found.reasons[0]


@dataclass(frozen=True)
class RepeatableCall:
    """A call of a module, with everything needed to make the call again and compare the results.

    Attributes:
        module: to be called.
        args, kwargs: the arguments.
        batch: the batch of the call, with pages and states of this module only.
        expected: the returned tensors of the native model, then the written ones.
        allowed: the tolerance of each.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    batch: AttentionBatch | None
    expected: Sequence[Tensor]
    allowed: Sequence[Tolerance]

    def differences(self) -> Differences:
        """Make the call, and compare results and written arguments with the expected ones."""
        # Kernels may write to arguments, as a cache does.
        taken = tensors_within((self.args, self.kwargs))
        before = [value.clone() for value in taken]
        try:
            with _attending(self.batch), exits_as_errors():
                results = tensors_within(self.module(*self.args, **self.kwargs))
        except Exception as error:  # the kernel's own
            return Differences(None, (f"it raised {own_words(error)}",))
        found = [("its result", each) for each in results]
        for former, after in zip(before, taken, strict=True):
            if not same(former, after):
                found.append(("what it wrote", after))
        if len(found) != len(self.expected):
            told = f"it returned or wrote {len(found)} tensors"
            return Differences(None, (f"{told}, the native model {len(self.expected)}",))
        # The native model may run on another device.
        placed = [
            right.to(ours.device) for (_, ours), right in zip(found, self.expected, strict=True)
        ]
        return compare(found, placed, self.allowed)


@dataclass(frozen=True)
class Departure:
    """The first call with a result beyond the tolerance.

    Attributes:
        place: of the called module.
        call: can be made again.
        inputs: the arguments in words, a line for each.
    """

    place: ComparedModule
    call: RepeatableCall
    inputs: Sequence[str]


@dataclass(frozen=True)
class Verification:
    """The outcome of comparing two models.

    Attributes:
        places: the compared places, in the order of the first calls.
        unreached: paths of called ops without a call of the native model.
        departure: the first call beyond the tolerance, or ``None``.
    """

    places: Sequence[ComparedModule]
    unreached: Sequence[str]
    departure: Departure | None


def verify(native: nn.Module, grafted: nn.Module, steps: Steps) -> Verification:
    """Compare two models with the same weights.

    Args:
        native: runs native definitions, or modules without ops.
        grafted: has the ops to be verified. Modules that compute several layers in one call must
            call the layers.
        steps: makes the calls of either model.

    Raises:
        InputError: ``grafted`` calls no op, or ``native`` computes nothing but NaN, so that
            everything agrees.
        Exception: ``grafted`` raised the exception, and every op is within the tolerance.
    """
    with torch.no_grad():
        places, failure = _modules_to_compare(native, grafted, steps)
        comparer = _Comparer(native, grafted, places)
        # The whole model and its ops write to caches of their own.
        calls = zip(steps(native), steps(grafted), steps(grafted), strict=True)
        with comparer.attached():
            for ours, theirs, whole in calls:
                comparer.batch = theirs.batch
                comparer.whole = whole.batch
                with ours.attending():
                    computed = tensors_within(ours.call(native))
                if not comparer.found:
                    _expect_numbers(computed)
    # No op is wrong, so that the graft itself raised.
    if failure and not comparer.found:
        raise failure
    unreached = [place.path for place in places.values() if place.served and not place.calls]
    reached = [places[path] for path in comparer.order]
    return Verification(reached, unreached, comparer.found)


def _expect_numbers(computed: Sequence[Tensor]) -> None:
    floating = [each for each in computed if each.is_floating_point() and each.numel()]
    if floating and all(bool(each.isnan().all()) for each in floating):
        raise InputError(
            "the native model computes nothing but NaN, with which every result agrees: its "
            "weights are damaged, or what it is called with"
        )


def _modules_to_compare(
    native: nn.Module, grafted: nn.Module, steps: Steps
) -> tuple[dict[str, ComparedModule], Exception | None]:
    """Return the places to compare, and the exception of the grafted model.

    A place is the path of each called op, or of the nearest module in both models. The last place
    is the model itself.
    """
    ops = {path: op for path, op in grafted.named_modules() if isinstance(op, CustomOp)}
    called, failure = _called_ops(grafted, ops, steps)
    if failure:
        # Comparing finds the op that raises.
        logger.debug("the model raised %s, so all of its ops are compared", described(failure))
        called = ops
    if not called:
        raise InputError("the model calls no op of opgraft, so there is nothing to compare")
    known = {path for path, _ in native.named_modules()}
    served: dict[str, list[ServedOp]] = {"": []}
    for path, op in called.items():
        served.setdefault(_nearest(path, known), []).append(_served(op))
    return {path: ComparedModule(path, tuple(ops)) for path, ops in served.items()}, failure


def _called_ops(
    model: nn.Module, ops: Mapping[str, CustomOp], steps: Steps
) -> tuple[dict[str, CustomOp], Exception | None]:
    """Run a model; return the called ops by path, and the exception of the model."""
    called: dict[str, CustomOp] = {}

    def note(path: str) -> Callable[..., None]:
        def hook(module: CustomOp, *_: Any) -> None:
            called[path] = module

        return hook

    with ExitStack() as undo:
        for path, op in ops.items():
            undo.callback(op.register_forward_hook(note(path)).remove)
        try:
            for step in steps(model):
                with step.attending(), exits_as_errors():
                    step.call(model)
        except Exception as error:
            return called, error
    return called, None


def _nearest(path: str, known: set[str]) -> str:
    # A graft may fuse several modules into one that the native model lacks.
    while path not in known:
        path = path.rpartition(".")[0]
    return path


def _served(op: CustomOp) -> ServedOp:
    binding = op.binding
    name = op_name_of(op.op_class, host_state()) or op.op_class.__qualname__
    return ServedOp(name, binding.kernel_name, binding.provider, binding.kernel.winner.location)


class _Comparer:
    """Repeats each call of a native module with the grafted model's module at the same path.

    Attributes:
        batch: the current batch of ops.
        whole: the current batch of the whole grafted model.
        found: the first departure.
        order: the paths of compared places, in the order of the first calls.
    """

    def __init__(
        self, native: nn.Module, grafted: nn.Module, places: dict[str, ComparedModule]
    ) -> None:
        self.native = native
        self.places = places
        self.batch: AttentionBatch | None = None
        self.whole: AttentionBatch | None = None
        self.found: Departure | None = None
        self.order: list[str] = []
        self._grafted = dict(grafted.named_modules(remove_duplicate=False))
        # Modules among the arguments become those of the grafted model.
        self._twins: dict[int, nn.Module] = {}
        for path, module in native.named_modules():
            self._twins[id(module)] = self._grafted.get(path, module)
        # Calls nest: the arguments of the innermost one come last.
        self._given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def attached(self) -> ExitStack:
        """Return a scope that watches the native model."""
        undo = ExitStack()
        for path, place in self.places.items():
            module = self.native.get_submodule(path)
            undo.callback(module.register_forward_pre_hook(self._before, with_kwargs=True).remove)
            hook = self._after(place)
            undo.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        return undo

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._given.append(copied((args, kwargs), dict(self._twins)))

    def _after(self, place: ComparedModule) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            given = self._given.pop()
            expected = tensors_within(result)
            pairs = zip(tensors_within(given), tensors_within((args, kwargs)), strict=True)
            expected += [after for before, after in pairs if not same(before, after)]
            if place.path not in self.order:
                self.order.append(place.path)
            place.calls += 1
            self._compare(place, module, *given, expected)

        return hook

    def _compare(
        self,
        place: ComparedModule,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        expected: Sequence[Tensor],
    ) -> None:
        """Make a call of the native model with the grafted module, on copies."""
        twin = self._grafted[place.path]
        allowed = [_allowed(twin, each.dtype) for each in expected]
        current = self.batch if place.path else self.whole
        # The call writes to the batch. A departure needs the batch as it was.
        before = None if current is None or self.found else _batch_of(twin, current)
        taken, named = copied((args, kwargs), {})
        found = RepeatableCall(twin, taken, named, current, expected, allowed).differences()
        place.add(found)
        if found.reasons and self.found is None:
            # The rest of the model may write to the tensors.
            kept = [each.clone() for each in expected]
            call = RepeatableCall(twin, args, kwargs, before, kept, allowed)
            self.found = Departure(place, call, _inputs(module, args, kwargs))


def _allowed(module: nn.Module, dtype: torch.dtype) -> Tolerance:
    """Return the tolerance of a module's results in a dtype.

    Roundings go either way, so that those of many ops add up as a random walk does: the tolerance
    of a module of ``n`` ops with specs is the square root of ``n`` times that of one op.
    """
    ops = [part for part in module.modules() if isinstance(part, CustomOp)]
    targets = [op.binding.replacement.target for op in ops]
    # Specs have no complex dtypes, and both parts of a number round alike.
    real = dtype.to_real() if dtype.is_complex else dtype
    absolute, relative = tolerance_of(targets, [real])
    with_specs = sum(bool(specs_of(target)) for target in targets)
    times = math.sqrt(max(with_specs, 1))
    return times * absolute, times * relative


def _batch_of(module: nn.Module, batch: AttentionBatch) -> AttentionBatch:
    """Return a batch with copies of the caches that a module may write to."""
    layers = (part for part in module.modules() if isinstance(part, CachedAttention | StateLayer))
    names = {layer.prefix for layer in layers}
    pages = {}
    for name in names & batch.pages.keys():
        own = batch.pages[name]
        pages[name] = dataclasses.replace(own, cache=own.cache.clone())
    states = {}
    for name in names & batch.states.keys():
        held = batch.states[name]
        copies = tuple(tensor.clone() for tensor in held.tensors)
        states[name] = dataclasses.replace(held, tensors=copies)
    return dataclasses.replace(batch, pages=pages, states=states)


def _inputs(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """Describe the arguments of a module, a line for each."""
    arguments = arguments_of(module.forward, args, kwargs)
    return [f"{name}: {description_of(leaf)}" for name, leaf in arguments.items()]
