"""Checks of a plugin's kernels beyond the proof of a form, such as copies, threads and gradients.

Each check raises ``AssertionError`` as its failure, like those of ``checks``. A check that returns
a text does not apply, for that reason.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
import statistics
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

import torch
from opgraft.binding.comparison import same
from opgraft.binding.functional import binding_of
from opgraft.binding.kernels import Kernel, KernelChoice, declared_kernels
from opgraft.binding.specialisation import bind
from opgraft.compat.python_device import follows_tensor
from opgraft.config import CompilationConfig, OpgraftConfig, set_config
from opgraft.ops.spec import Arguments, OpSpec, in_float64, tensors
from opgraft.ops.weights import default_weight_loader
from opgraft.platform import DISPATCH_KEYS, HOST
from opgraft.registry.op_classes import own_classes
from opgraft.testing import checks, inventory
from opgraft.testing.side_by_side import expect_same, loses_gradients, seconds_of
from opgraft.testing.subjects import Subject, Trial
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

LARGE = 300.0
"""The factor for inputs of the check ``range``: float16 holds the product, and not its square."""

ROUNDS = 7
"""Pairs of calls for a measurement of speed."""

THREADS = 4
"""Threads that call at once."""

_OPERATORS = (type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor))

_OF_OTHERS = frozenset(
    {"aten", "opgraft", "prim", "prims", "mkldnn", "mkl", "quantized", "profiler"}
)
"""Namespaces of operators that no plugin brings. A compiled function calls the profiler's."""


def check_reached(trial: Trial) -> None:
    """Constructing the target gives the replacement, and a kernel of the replacement is bound."""
    subject = trial.subject
    replacement = subject.replacement
    choice = inventory.choice_here(subject.target)
    if choice.cls is not replacement.cls:
        rows = choice.decision.candidates
        row = next(row for row in rows if row.location == replacement.location)
        raise AssertionError(
            f"{row.name} at {row.location} is never constructed here: {row.reason}"
        )
    if subject.is_op:
        _expect_kernels(subject)


def _expect_kernels(subject: Subject) -> None:
    """Check that no kernel of a replacement is hidden, and one is bound."""
    own = _own_kernels(subject)
    for kernel in own:
        hiding = hidden_by(kernel, own)
        if hiding:
            raise AssertionError(
                f"{kernel} at {kernel.location} is never called: {hiding} of that op hides it"
            )
    bound = _bound(subject)
    in_chain = declared_kernels(subject.replacement.cls, bound.chain)
    # Kernels for other devices alone are no failure.
    may_run = any(kernel in in_chain for kernel in own)
    if bound.winner in own or not may_run:
        return
    missing = [f"{kernel} {reason}" for kernel in own if (reason := kernel.missing())]
    provider = subject.replacement.provider
    raise AssertionError(f"{bound.winner} runs here, no kernel of {provider}: {'; '.join(missing)}")


def _bound(subject: Subject) -> KernelChoice:
    return bind(subject.target).kernel


def own_winner(subject: Subject) -> Kernel | None:
    """Return the bound kernel if it belongs to the replacement itself."""
    winner = _bound(subject).winner
    return winner if winner in _own_kernels(subject) else None


def _own_kernels(subject: Subject) -> list[Kernel]:
    """Return the kernels of the replacement's own classes, for any platform, most derived first."""
    own = subject.replacement.cls
    declared = declared_kernels(own, DISPATCH_KEYS)
    if own is subject.target:
        return declared
    inherited = subject.target.__mro__
    return [kernel for kernel in declared if kernel.owner not in inherited]


def hidden_by(kernel: Kernel, own: list[Kernel]) -> Kernel | None:
    """Return the ``forward`` that hides a kernel for any device; ``None`` if none does."""
    if kernel.key in ("forward", "native"):
        return None
    classes = own_classes(own[0].owner)
    place = classes.index(kernel.owner)
    for other in own:
        if other.key == "forward" and classes.index(other.owner) <= place:
            return other
    return None


def check_switching(trial: Trial) -> None:
    """``custom_ops`` switches the kernel off and on; the native definition runs if switched off."""
    op = trial.subject.op
    calls = trial.calls
    kernel = _bound(trial.subject).winner
    # Each call builds the module anew, and so chooses the kernel in the scope.
    with _custom_ops(f"-{op}"):
        found = binding_of(trial.form).kernel.winner
        if found.key != "native":
            raise AssertionError(
                f"{found} runs where custom_ops switches {op} off, not forward_native"
            )
        for call in calls:
            checks.check_values(trial.spec, trial.variant, torch.float32, call, brief=True)
    with _custom_ops("none", f"+{op}"):
        found = binding_of(trial.form).kernel.winner
    if found != kernel:
        raise AssertionError(f"{found} runs where custom_ops switches {op} on, not {kernel}")


def _custom_ops(*custom_ops: str) -> Any:
    compilation = CompilationConfig(custom_ops=custom_ops)
    return set_config(OpgraftConfig(compilation_config=compilation))


def check_state(trial: Trial) -> None:
    """Parameters and buffers are those of the target by name, shape and dtype, and load alike."""
    subject = trial.subject
    arguments = trial.small()
    op, inputs = subject.build(arguments)
    own = inventory.choice_here(subject.target).own.name
    with set_config(OpgraftConfig(providers={subject.op: own})):
        # Arguments drawn anew give the target memory of its own.
        target, _ = trial.build_small()
    ours = _state(op)
    theirs = _state(target)
    if ours != theirs:
        told = "; ".join(_changes(ours, theirs))
        raise AssertionError(
            f"the state differs from that of {subject.target.__qualname__}: {told}"
        )
    # Both directions, as checkpoints are written by either.
    target.load_state_dict(op.state_dict())
    op.load_state_dict(target.state_dict())
    with torch.no_grad():
        expected = tensors(trial.spec.reference(**in_float64(arguments)))
        checks.compare(trial.spec, torch.float32, tensors(op(*inputs)), expected)
        _check_loaders(op, dict(target.named_parameters()))


def _changes(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    told = []
    for name in sorted({*ours, *theirs}):
        here = ours.get(name, "missing")
        there = theirs.get(name, "none")
        if here != there:
            told.append(f"{name}: {here}, expected {there}")
    return told


def _check_loaders(op: nn.Module, of_target: Mapping[str, nn.Parameter]) -> None:
    """The loader of each parameter makes the same of a weight as the target's loader."""
    for name, ours in op.named_parameters():
        theirs = of_target[name]
        values = torch.linspace(-1, 1, theirs.numel(), device=theirs.device)
        # Values differ, so that a transposed weight shows.
        weight = values.view_as(theirs).to(theirs)
        for parameter in (ours, theirs):
            load = getattr(parameter, "weight_loader", default_weight_loader)
            load(parameter, weight)
        expect_same(f"{name}, loaded by its weight_loader,", [ours], [theirs])


def _state(op: nn.Module) -> Mapping[str, str]:
    """Describe parameters and buffers: shape, dtype, and a parameter's attributes for loaders."""
    marks = {name: sorted(vars(parameter)) for name, parameter in op.named_parameters()}
    described = {}
    for name, value in op.state_dict().items():
        dtype = str(value.dtype).removeprefix("torch.")
        words = [str(tuple(value.shape)), dtype, *marks.get(name, [])]
        described[name] = " ".join(words)
    return described


def check_copies(trial: Trial) -> None:
    """A deep copy and an unpickled op have the same class, own memory and equal results."""
    op, inputs = trial.build_small()
    copies = {
        "a deep copy": copy.deepcopy(op),
        "an unpickled op": pickle.loads(pickle.dumps(op)),  # noqa: S301
    }
    with torch.no_grad():
        expected = tensors(op(*inputs))
        # A copy with shared memory would compute the same, so memory is compared first.
        for what, made in copies.items():
            _expect_own_copy(what, made, op)
            found = tensors(made(*inputs))
            expect_same(f"{what} of {trial.subject.name}", found, expected)


def _expect_own_copy(what: str, made: nn.Module, op: nn.Module) -> None:
    if type(made) is not type(op):
        raise AssertionError(
            f"{what} is a {type(made).__qualname__}, expected {type(op).__qualname__}"
        )
    if checks.memory_of(op.state_dict().values()) & checks.memory_of(made.state_dict().values()):
        raise AssertionError(f"{what} has the very parameters of what it is a copy of")


def check_repetition(trial: Trial) -> None:
    """A call gives the same bits again, and leaves the results of earlier calls as they are."""
    for call in kept_calls(trial):
        _check_repetition_of(call, trial)


def _check_repetition_of(call: checks.Implementation, trial: Trial) -> None:
    name = trial.form.name
    arguments = trial.small()
    # Other numbers of the same shape: a kernel may reuse buffers by shape.
    others = {key: -value if _is_floating(value) else value for key, value in arguments.items()}
    run = functools.partial(checks.results_of, trial.spec, call)
    with torch.no_grad():
        first = run(arguments)
        # A kernel that reuses its output would overwrite the first results themselves.
        bits = [value.clone() for value in first]
        second = run(arguments)
        expect_same(f"a second call of {name}", second, bits)
        run(others)
    expect_same(f"what the first call of {name} returned, after another one,", first, bits)
    if checks.memory_of(first) & checks.memory_of(second):
        raise AssertionError(f"two calls of {name} returned the same memory")


def check_reentrancy(trial: Trial) -> None:
    """Threads that call at once, each with inputs of its own, get the results of lone calls."""
    leads = [lead for lead in trial.spec.leads if min(lead) > 0]
    drawn = [trial.arguments(lead, max(trial.spec.sizes[:2])) for lead in leads[:THREADS]]
    # Each thread calls several times, as a race may go well once.
    for call in trial.calls:
        run = functools.partial(checks.results_of, trial.spec, call)
        with torch.no_grad():
            alone = [run(arguments) for arguments in drawn]
        with ThreadPoolExecutor(THREADS) as threads:
            # Settings are context variables, which new threads do not have.
            started = [threads.submit(copy_context().run, _repeated, run, each) for each in drawn]
            found = [each.result() for each in started]
        what = f"a call of {trial.form.name} beside those of other threads"
        for expected, rounds in zip(alone, found, strict=True):
            for results in rounds:
                expect_same(what, results, expected)


@torch.no_grad()
def _repeated(run: Any, arguments: Arguments) -> list[list[Tensor]]:
    return [run(arguments) for _ in range(ROUNDS)]


def kept_calls(trial: Trial) -> list[checks.Implementation]:
    """List the implementations, with one module that all calls share, as in a model."""
    calls = trial.calls
    if not trial.is_built:
        return calls
    made: list[nn.Module] = []

    def call(**arguments: Any) -> Any:
        op, inputs = trial.subject.build(arguments)
        if not made or not _is_updated(made[0], op):
            made[:] = [op]
        return made[0](*inputs)

    return [*calls[:-1], call]


def _is_updated(op: nn.Module, other: nn.Module) -> bool:
    """Copy parameters and buffers into the memory of an op, as an update of weights does.

    Returns:
        False if their shapes are others. Then nothing is copied.
    """
    pairs = list(zip(_state_of(op), _state_of(other), strict=True))
    if any(own.shape != new.shape for own, new in pairs):
        return False
    for own, new in pairs:
        # The arguments of the first call are the parameters of its module.
        if own.data_ptr() != new.data_ptr():
            own.copy_(new)
    return True


def _state_of(op: nn.Module) -> list[Tensor]:
    return [*op.parameters(), *op.buffers()]


def check_range(trial: Trial) -> str | None:
    """Large inputs overflow only if they overflow in the native definition, too."""
    larger = dataclasses.replace(trial.spec, inputs=functools.partial(_large_inputs, trial.spec))
    check = functools.partial(checks.check_values, larger, trial.variant, trial.dtype, brief=True)
    try:
        check(trial.form.native)
    except AssertionError:
        return (
            "the native definition itself leaves its tolerance for inputs that are "
            f"{LARGE:g} times as large"
        )
    for call in trial.calls:
        check(call)
    return None


def _large_inputs(spec: OpSpec, *drawn: Any) -> Arguments:
    arguments = spec.inputs(*drawn)
    name = next(name for name, value in arguments.items() if _is_floating(value))
    return {**arguments, name: arguments[name] * LARGE}


def check_compilation(trial: Trial) -> str | None:
    """The op compiles without a graph break, once for all sizes, to the same results."""
    made = torch.empty(0, device=trial.spec.device)
    if not follows_tensor(made):
        kind = type(made).__name__
        return f"torch.compile follows no tensors of class {kind}, such as this device has"
    if trial.subject.function is not None:
        checks.check_compilation(trial.spec, trial.variant, trial.form)
        return None
    drawn = checks.growing_arguments(trial.spec, trial.variant)
    built = [trial.subject.build(arguments) for arguments in drawn]
    runs = [functools.partial(_run, inputs=inputs) for _, inputs in built]
    checks.expect_one_graph(trial.form.name, built[0][0], runs)
    return None


def _run(call: Any, inputs: tuple[Any, ...]) -> list[Tensor]:
    return tensors(call(*inputs))


def check_gradients(trial: Trial) -> None:
    """No result loses a gradient. In float64, gradients are those of finite differences."""
    wide = torch.float64 in trial.subject.dtypes
    dtype = torch.float64 if wide else torch.float32
    for call in trial.calls:
        required = checks.with_gradients(trial.small(dtype))
        expected = tensors(trial.form.native(**required))
        if loses_gradients(tensors(call(**required)), expected):
            raise AssertionError(
                f"{_bound(trial.subject).winner} loses gradients: its results require none where "
                "the inputs do. Mark it with @opgraft.inference_only, or give it a backward"
            )
    if not wide:
        return
    if trial.subject.function is not None:
        checks.check_gradients(trial.spec, trial.variant, trial.form)
    else:
        _check_module_gradients(trial)


def _check_module_gradients(trial: Trial) -> None:
    """Check the gradients by the inputs of a module; parameters belong to the module."""
    arguments = checks.smallest_arguments(trial.spec, trial.variant)
    op, inputs = trial.subject.build(arguments)
    # Integers have no gradient.
    places = [place for place, value in enumerate(inputs) if _is_floating(value)]

    # Finite differences change numbers one by one. Some devices compile each such change.
    def by_tensors(*values: Tensor) -> list[Tensor]:
        given = list(inputs)
        for place, value in zip(places, values, strict=True):
            given[place] = value.to(trial.spec.device)
        return [result.to(HOST) for result in tensors(op(*given))]

    values = [inputs[place].to(HOST) for place in places]
    checks.expect_gradients(trial.subject.name, by_tensors, values)


@contextmanager
def _plain_opcheck() -> Iterator[None]:
    """Pass over a warning of torch's own code, where warnings are errors."""
    with warnings.catch_warnings():
        # opcheck of torch 2.15 reads the gradient of what it copies.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        yield


def check_operators(trial: Trial) -> str | None:
    """``torch.library.opcheck`` accepts each operator of the plugin that a call runs.

    Inputs have the smallest size that an operator takes: a kernel may try an operator, and compute
    in another way if the operator refuses.
    """
    has_function = trial.subject.function is not None
    if has_function:
        with _plain_opcheck():
            checks.check_registration(trial.spec, trial.variant)
    noted = _Operators()
    for size in (max(trial.spec.sizes[:2]), *trial.spec.sizes[2:]):
        for call in trial.calls:
            arguments = trial.arguments(trial.spec.leads[1], size, torch.float32)
            with torch.no_grad(), noted:
                call(**arguments)
        if noted.calls:
            break
    winner = own_winner(trial.subject)
    # For a gradient, such a kernel leaves the call to the native definition.
    is_without_gradients = winner is not None and winner.inference_only
    # opcheck calls the operator itself, and so runs outside of the mode.
    for operator, args, kwargs in noted.calls.values():
        if is_without_gradients:
            args = tuple(map(_detached, args))
            kwargs = {name: _detached(value) for name, value in kwargs.items()}
        with _plain_opcheck():
            torch.library.opcheck(operator, args, kwargs)
    if noted.calls or has_function:
        return None
    return "it runs no operator of its own"


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


class _Operators(TorchFunctionMode):
    """Notes operators that are neither torch's nor opgraft's, with arguments of one call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if not is_operator_of_plugin(func) or str(func) in self.calls:
            return func(*args, **given)
        former_args = [_copied(each) for each in args]
        former_named = {name: _copied(each) for name, each in given.items()}
        result = func(*args, **given)
        # Only an operator that took the arguments is noted. One that writes zeros to its input
        # would change nothing in a second call, so each argument is as it was before the first.
        before = tuple(map(_unless_equal, args, former_args))
        named = {}
        for name, each in given.items():
            named[name] = _unless_equal(each, former_named[name])
        self.calls[str(func)] = (func, before, named)
        return result


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _unless_equal(value: Any, former: Any) -> Any:
    """Return the value itself, or the former one if the value was written to."""
    # A copy may have another layout, so an argument that is only read stays.
    return former if isinstance(value, Tensor) and not same(value, former) else value


def is_operator_of_plugin(func: object) -> bool:
    """Return True for an operator that is neither torch's nor opgraft's."""
    return isinstance(func, _OPERATORS) and str(func).partition(".")[0] not in _OF_OTHERS


def speed_of(trial: Trial) -> float:
    """Return the speed on the largest inputs, as a multiple of the native definition's."""
    spec = trial.spec
    lead = spec.leads[1]
    size = max(spec.sizes)
    if spec.large:
        lead, size = spec.large[-1]
    arguments = trial.arguments(lead, size)
    run = functools.partial(checks.results_of, spec, arguments=arguments)
    native = functools.partial(run, trial.form.native)
    ours = functools.partial(run, trial.calls[0])
    ratios = []
    with torch.no_grad():
        # One after the other, as other processes slow both down.
        for _ in range(ROUNDS):
            native_seconds = seconds_of(native)
            ratios.append(native_seconds / seconds_of(ours))
    return round(statistics.median(ratios), 3)


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.itemsize > 1
