"""Checks of a plugin's kernels beyond the proof of a form: how they are bound, kept, copied, repeated and compiled.

As those of ``checks``, each raises ``AssertionError`` where it fails.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
import statistics
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import torch
from opgraft.binding.functional import binding_of
from opgraft.binding.kernels import Kernel, KernelChoice, declared_kernels
from opgraft.binding.specialisation import bind
from opgraft.config import CompilationConfig, OpgraftConfig, set_config
from opgraft.ops.spec import Arguments, OpSpec, in_float64, tensors
from opgraft.ops.weights import default_weight_loader
from opgraft.platform import DISPATCH_KEYS
from opgraft.plugins.selection import current_platform
from opgraft.registry.op_classes import own_classes
from opgraft.testing import checks, inventory
from opgraft.testing.subjects import Subject
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

LARGE = 300.0
"""By which inputs are multiplied where overflow is looked for: float16 holds the product, and not its square."""

ROUNDS = 7
"""Pairs of calls by which speed is measured."""

THREADS = 4
"""Threads that call at once."""

_OPERATORS = (type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor))

_OF_OTHERS = frozenset({"aten", "opgraft", "prim", "prims", "mkldnn", "mkl", "quantized"})
"""Namespaces of operators that no plugin brings."""


def check_reached(subject: Subject) -> None:
    """Constructing the target gives the replacement, and what it defines as a kernel can be bound."""
    choice = inventory.choice_here(subject.target)
    replacement = subject.replacement
    if choice.cls is not replacement.cls:
        row = next(
            row for row in choice.decision.candidates if row.location == replacement.location
        )
        raise AssertionError(
            f"{row.name} at {row.location} is never constructed here: {row.reason}"
        )
    own = _own_kernels(subject) if subject.is_op else []
    for kernel in own:
        hiding = hidden_by(kernel, own)
        if hiding:
            raise AssertionError(
                f"{kernel} at {kernel.location} is never called: {hiding} of that op hides it"
            )
    if (
        own
        and _bound(subject).winner not in own
        and any(kernel in _in_chain(subject) for kernel in own)
    ):
        missing = "; ".join(f"{kernel} {reason}" for kernel in own if (reason := kernel.missing()))
        raise AssertionError(
            f"{_bound(subject).winner} runs here, no kernel of {replacement.provider}: {missing}"
        )


def _bound(subject: Subject) -> KernelChoice:
    return bind(subject.target).kernel


def _own_kernels(subject: Subject) -> list[Kernel]:
    """Return the kernels that the replacement's own classes define, for any platform, the most derived first."""
    own, target = subject.replacement.cls, subject.target
    inherited = target.__mro__ if own is not target else ()
    return [
        kernel for kernel in declared_kernels(own, DISPATCH_KEYS) if kernel.owner not in inherited
    ]


def _in_chain(subject: Subject) -> list[Kernel]:
    return declared_kernels(subject.replacement.cls, _bound(subject).chain)


def hidden_by(kernel: Kernel, own: list[Kernel]) -> Kernel | None:
    """Return the ``forward`` that hides a kernel for any device, if there is one."""
    if kernel.key in ("forward", "native"):
        return None
    classes = own_classes(own[0].owner)
    place = classes.index(kernel.owner)
    return next((k for k in own if k.key == "forward" and classes.index(k.owner) <= place), None)


def check_switching(subject: Subject, variant: str) -> None:
    """``custom_ops`` switches the kernel off and on; off, the native definition computes."""
    spec, calls, kernel = subject.proof, subject.calls(variant), _bound(subject).winner
    with _under(f"-{subject.op}"):
        found = binding_of(spec.functional).kernel.winner
        if found.key != "native":
            raise AssertionError(
                f"{found} runs where custom_ops switches {subject.op} off, not forward_native"
            )
        for call in calls:
            checks.check_values(spec, variant, torch.float32, call, brief=True)
    with _under("none", f"+{subject.op}"):
        found = binding_of(spec.functional).kernel.winner
    if found != kernel:
        raise AssertionError(
            f"{found} runs where custom_ops switches {subject.op} on, not {kernel}"
        )


def _under(*custom_ops: str) -> Any:
    return set_config(OpgraftConfig(compilation_config=CompilationConfig(custom_ops=custom_ops)))


def check_state(subject: Subject, variant: str) -> None:
    """It has the parameters and buffers of its target, by name, shape and dtype, and loads what that loads."""
    spec = subject.proof
    arguments = _small(spec, variant)
    op, inputs = subject.build(variant, arguments)
    own = inventory.choice_here(subject.target).own.name
    with set_config(OpgraftConfig(providers={subject.op: own})):
        target, _ = subject.build(variant, _small(spec, variant))  # in memory of its own
    ours, theirs = _state(op), _state(target)
    if ours != theirs:
        changed = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
        told = "; ".join(
            f"{name}: {ours.get(name, 'missing')}, expected {theirs.get(name, 'none')}"
            for name in changed
        )
        raise AssertionError(
            f"the state differs from that of {subject.target.__qualname__}: {told}"
        )
    target.load_state_dict(op.state_dict())
    op.load_state_dict(target.state_dict())
    with torch.no_grad():
        expected = tensors(spec.reference(**in_float64(arguments)))
        checks.compare(spec, torch.float32, tensors(op(*inputs)), expected)
        _check_loaders(op, dict(target.named_parameters()))


def _check_loaders(op: nn.Module, of_target: Mapping[str, nn.Parameter]) -> None:
    """A weight of a checkpoint becomes the same in both, by the loader of each parameter."""
    for name, ours in op.named_parameters():
        theirs = of_target[name]
        weight = (
            torch.linspace(-1, 1, theirs.numel(), device=theirs.device).view_as(theirs).to(theirs)
        )
        for parameter in (ours, theirs):
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, weight)
        _expect_same(f"{name}, loaded by its weight_loader,", [ours], [theirs])


def _state(op: nn.Module) -> Mapping[str, str]:
    """Describe parameters and buffers: shape, dtype, and the attributes by which loaders know a parameter."""
    marks = {name: sorted(vars(parameter)) for name, parameter in op.named_parameters()}
    return {
        name: " ".join(
            [str(tuple(value.shape)), str(value.dtype).removeprefix("torch."), *marks.get(name, [])]
        )
        for name, value in op.state_dict().items()
    }


def check_copies(subject: Subject, variant: str) -> None:
    """A deep copy and an unpickled op are of the same class, have memory of their own, and compute the same."""
    spec = subject.proof
    op, inputs = subject.build(variant, _small(spec, variant))
    memory = {value.data_ptr() for value in op.state_dict().values() if value.numel()}
    with torch.no_grad():
        expected = tensors(op(*inputs))
        copies = {
            "a deep copy": copy.deepcopy(op),
            "an unpickled op": pickle.loads(pickle.dumps(op)),  # noqa: S301
        }
        for what, made in copies.items():
            if type(made) is not type(op):
                raise AssertionError(
                    f"{what} is a {type(made).__qualname__}, expected {type(op).__qualname__}"
                )
            if memory & {value.data_ptr() for value in made.state_dict().values()}:
                raise AssertionError(f"{what} has the very parameters of what it is a copy of")
            _expect_same(f"{what} of {subject.name}", tensors(made(*inputs)), expected)


def check_repetition(subject: Subject, variant: str) -> None:
    """The same inputs give the same bits again, and no call changes what an earlier one returned."""
    spec = subject.proof
    arguments = _small(spec, variant)
    others = {name: -v if _is_floating(v) else v for name, v in arguments.items()}
    run = checks.results_of
    for call in _kept(subject, variant):
        with torch.no_grad():
            first = run(spec, call, arguments)
            bits = [value.clone() for value in first]
            second = run(spec, call, arguments)
            _expect_same(f"a second call of {spec.functional.name}", second, bits)
            run(spec, call, others)
        _expect_same(
            f"what the first call of {spec.functional.name} returned, after another one,",
            first,
            bits,
        )
        shared = {v.untyped_storage().data_ptr() for v in first if v.numel()}
        if shared & {v.untyped_storage().data_ptr() for v in second if v.numel()}:
            raise AssertionError(f"two calls of {spec.functional.name} returned the same memory")


def check_reentrancy(subject: Subject, variant: str) -> None:
    """Threads that call it at once, each with inputs of its own, get what each gets alone."""
    spec = subject.proof
    leads = [lead for lead in spec.leads if min(lead) > 0]
    drawn = [
        spec.arguments(variant, torch.float32, lead, max(spec.sizes[:2]))
        for lead in leads[:THREADS]
    ]
    for call in subject.calls(variant):
        with torch.no_grad():
            alone = [checks.results_of(spec, call, arguments) for arguments in drawn]
        with ThreadPoolExecutor(THREADS) as threads:
            together = [
                threads.submit(copy_context().run, _several, spec, call, each) for each in drawn
            ]
            found = [each.result() for each in together]
        for expected, rounds in zip(alone, found, strict=True):
            for results in rounds:
                _expect_same(
                    f"a call of {spec.functional.name} beside those of other threads",
                    results,
                    expected,
                )


@torch.no_grad()
def _several(spec: OpSpec, call: checks.Implementation, arguments: Arguments) -> list[list[Tensor]]:
    return [checks.results_of(spec, call, arguments) for _ in range(ROUNDS)]


def _kept(subject: Subject, variant: str) -> list[checks.Implementation]:
    """List what computes a variant, with a module that all calls share, as in a model."""
    calls = subject.calls(variant)
    if variant not in subject.built:
        return calls
    made: list[nn.Module] = []

    def call(**arguments: Any) -> Any:
        op, inputs = subject.build(variant, arguments)
        made.append(op)
        return made[0](*inputs)

    return [*calls[:-1], call]


def _expect_same(what: str, found: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            raise AssertionError(
                f"{what} is {tuple(ours.shape)} {ours.dtype}, expected {tuple(theirs.shape)} {theirs.dtype}"
            )
        same = (
            (ours == theirs) | (ours.isnan() & theirs.isnan())
            if ours.itemsize > 1
            else ours == theirs
        )
        if not same.all():
            raise AssertionError(
                f"{what} has other values: {int((~same).sum())} of {same.numel()} differ"
            )


def check_range(subject: Subject, variant: str, dtype: torch.dtype) -> str | None:
    """Large inputs overflow nowhere where the native definition's do not; returns why that cannot be told."""
    spec = subject.proof
    larger = dataclasses.replace(spec, inputs=functools.partial(_large_inputs, spec))
    try:
        checks.check_values(larger, variant, dtype, spec.functional.native, brief=True)
    except AssertionError:
        return f"the native definition itself leaves its tolerance for inputs that are {LARGE:g} times as large"
    for call in subject.calls(variant):
        checks.check_values(larger, variant, dtype, call, brief=True)
    return None


def _large_inputs(spec: OpSpec, *drawn: Any) -> Arguments:
    arguments = spec.inputs(*drawn)
    name = next(name for name, value in arguments.items() if _is_floating(value))
    return {**arguments, name: arguments[name] * LARGE}


def check_module_compilation(subject: Subject, variant: str) -> None:
    """The module compiles without a graph break, once for all sizes, to what it computes without compiling."""
    spec = subject.proof
    lead, size = next(lead for lead in spec.leads if min(lead) > 1), max(spec.sizes[:2])
    leads = [tuple(n * factor for n in lead) for factor in (1, 2, 3)]
    built = [
        subject.build(variant, spec.arguments(variant, torch.float32, lead, size)) for lead in leads
    ]
    runs = [functools.partial(_run, inputs=inputs) for _, inputs in built]
    checks.expect_one_graph(spec.functional.name, built[0][0], runs)


def _run(call: Any, inputs: tuple[Any, ...]) -> list[Tensor]:
    return tensors(call(*inputs))


def check_gradients(subject: Subject, variant: str, *, numerically: bool) -> None:
    """Results require a gradient where those of the native definition do; ``numerically``: it is the right one."""
    spec = subject.proof
    dtype = torch.float64 if numerically else torch.float32
    for call in subject.calls(variant):
        required = checks.with_gradients(_small(spec, variant, dtype))
        expected = tensors(spec.functional.native(**required))
        for ours, theirs in zip(tensors(call(**required)), expected, strict=True):
            if theirs.requires_grad and not ours.requires_grad:
                raise AssertionError(
                    f"{_bound(subject).winner} loses gradients: its results require none where the inputs do. Mark it "
                    "with @opgraft.inference_only, or give it a backward"
                )
    if numerically and subject.function is not None:
        checks.check_gradients(spec, variant, spec.functional)
    elif numerically:
        _check_module_gradients(subject, variant)


def _check_module_gradients(subject: Subject, variant: str) -> None:
    """Check the gradients by the inputs of a module, whose parameters are its own."""
    spec = subject.proof
    size = min((size for size in spec.sizes if size > 1), default=1)
    lead = min(
        (lead for lead in spec.leads if min(lead) > 0), key=lambda lead: (len(lead), max(lead))
    )
    op, inputs = subject.build(variant, spec.arguments(variant, torch.float64, lead, min(size, 4)))
    places = [place for place, value in enumerate(inputs) if _is_floating(value)]

    def by_tensors(*values: Tensor) -> Any:
        given = list(inputs)
        for place, value in zip(places, values, strict=True):
            given[place] = value
        return tuple(tensors(op(*given)))

    if not torch.autograd.gradcheck(
        by_tensors, [inputs[place].requires_grad_() for place in places]
    ):
        raise AssertionError(f"{subject.name}: gradients differ from finite differences")


def check_operators(subject: Subject, variant: str) -> str | None:
    """``torch.library.opcheck`` accepts each operator of the plugin that a call runs; returns why none was asked.

    Inputs are of the smallest size that an operator takes: a kernel may try one, and compute in another way what that
    refuses.
    """
    spec, found = subject.proof, _Operators()
    for size in (max(spec.sizes[:2]), *spec.sizes[2:]):
        for call in subject.calls(variant):
            with torch.no_grad(), found:
                call(**spec.arguments(variant, torch.float32, spec.leads[1], size))
        if found.calls:
            break
    for operator, args, kwargs in found.calls.values():
        torch.library.opcheck(operator, args, kwargs)
    return None if found.calls else "it runs no operator of its own"


class _Operators(TorchFunctionMode):
    """Notes operators that are neither torch's nor opgraft's, each with the arguments of a call that it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(func, _OPERATORS) and str(func).partition(".")[0] not in _OF_OTHERS:
            self.calls.setdefault(str(func), (func, args, kwargs or {}))
        return result


def speed_of(subject: Subject, variant: str, dtype: torch.dtype) -> float:
    """Return how many times as fast as the native definition the plugin is, on the largest inputs of the spec."""
    spec, wait = subject.proof, current_platform().synchronize
    lead, size = spec.large[-1] if spec.large else (spec.leads[1], max(spec.sizes))
    arguments = spec.arguments(variant, dtype, lead, size)
    ours, native = subject.calls(variant)[0], spec.functional.native
    ratios = []
    with torch.no_grad():
        for _ in range(
            ROUNDS
        ):  # of the two, one after the other, as other processes slow both down
            taken = []
            for call in (native, ours):
                checks.results_of(spec, call, arguments)
                wait()
                start = time.perf_counter()
                checks.results_of(spec, call, arguments)
                wait()
                taken.append(time.perf_counter() - start)
            ratios.append(taken[0] / taken[1])
    return round(statistics.median(ratios), 3)


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.itemsize > 1


def _small(spec: OpSpec, variant: str, dtype: torch.dtype = torch.float32) -> Arguments:
    return spec.arguments(variant, dtype, spec.leads[1], max(spec.sizes[:2]))
