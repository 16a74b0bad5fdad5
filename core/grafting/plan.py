"""The plan of a graft, as data. Planning does not change the model."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeAlias

import torch
from opgraft.base.text import described
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.marks import fallback_of
from opgraft.binding.names import op_name_of
from opgraft.binding.provenance import exit_behind, exits_as_errors, explain_exception
from opgraft.errors import GraftError, OpgraftError
from opgraft.grafting.adapters import CALL_ADAPTERS, builtin_adapters
from opgraft.grafting.attention import is_attention
from opgraft.grafting.exchange import build_op, joined_path
from opgraft.grafting.forwards import Substitution, plain_forward, reads_global
from opgraft.grafting.norms import Dtypes
from opgraft.grafting.obstacles import obstacle_of, read_by_parents
from opgraft.grafting.report import GraftReport, LeftAlone, replaced_by
from opgraft.ops import Linear
from opgraft.ops.linear.packed import pays_packed
from opgraft.ops.linear.weight_cache import declaration
from opgraft.plugins.discovery import discover
from opgraft.registry.adapter import Adapter, CallAdapter, FunctionCall, LeaveAlone
from opgraft.registry.decision import Provider
from opgraft.registry.plugin_adapters import PLUGIN_ADAPTERS
from opgraft.registry.state import host_state
from opgraft.registry.watching import interrupts_counted
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

_PASSED_OVER = (
    "quantize_dynamic and other code for torch.nn.Linear does not find the {} that became ops: "
    "call such code before graft"
)
_NOT_PATCHED = (
    "{} of the forwards call ops in place of functions of their files: if you patch such a "
    "function from now on, call ungraft first"
)
_FALLING_BACK = (
    "other code runs in place of {} of the ops under a compiler or an export: "
    "opgraft.explain(model) shows which"
)
_NOT_FROZEN = (
    "opgraft.freeze(model) lets kernels keep faster copies of the weights of {} of the linear "
    "layers, as long as nobody writes to them"
)
_COMPUTED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class Exchange:
    """An op that is going to take the place of a module.

    Attributes:
        path: of the module, the first one if the module has several places.
        module: the module.
        adapter: the name of the module's adapter.
        provider: of the adapter.
        arguments: of the op, from the adapter.
        op: the constructed op, with the module's tensors.
        inside: the exchanges of modules below, for ops inside ``op``.
    """

    path: str
    module: nn.Module
    adapter: str
    provider: Provider
    arguments: Mapping[str, Any]
    op: nn.Module
    inside: tuple[Exchange, ...] = ()


@dataclass(frozen=True, eq=False)
class GraftedCall:
    """An op for a forward to call in place of a function of the same file.

    Attributes:
        path: of the module.
        module: the module, which stays.
        function: the name of the function; "" if the op stands for all that the module computes.
        adapter: the name of the call's adapter.
        provider: of the adapter.
        op: the constructed op.
        substitution: leads the name in the forward to the op.
    """

    path: str
    module: nn.Module
    function: str
    adapter: str
    provider: Provider
    op: nn.Module
    substitution: Substitution


Entry: TypeAlias = Exchange | GraftedCall | LeftAlone


@dataclass(frozen=True, eq=False)
class ParentSlot:
    """One name under which a parent is going to have an op."""

    parent: nn.Module
    name: str
    op: nn.Module


@dataclass(frozen=True, eq=False)
class GraftPlan:
    """The changes of a graft.

    Attributes:
        entries: one for each change and each module that stays, in the model's order, children
            before parents.
        places: the places of the ops.
    """

    entries: tuple[Entry, ...]
    places: tuple[ParentSlot, ...]

    def exchanges(self) -> Iterator[Exchange]:
        """Walk over the ops that take the place of modules, ops inside other ops first."""
        yield from _flat(entry for entry in self.entries if isinstance(entry, Exchange))

    def calls(self) -> Iterator[GraftedCall]:
        """Walk over the ops for calls in forwards."""
        yield from (entry for entry in self.entries if isinstance(entry, GraftedCall))

    def report(self, applied: bool) -> GraftReport:
        """Put the plan in words, before or after the plan is ``applied``."""
        exchanges = [entry for entry in self.entries if isinstance(entry, Exchange)]
        replaced = []
        changes: list[Exchange | GraftedCall] = [*exchanges, *self.calls()]
        for change in changes:
            path, source = _labels(change)
            row = replaced_by(change.op, path, source, change.adapter, change.provider)
            replaced.append(row)
        left_alone = tuple(entry for entry in self.entries if isinstance(entry, LeftAlone))
        return GraftReport(tuple(replaced), left_alone, tuple(self._notes()), applied)

    def _notes(self) -> Iterator[str]:
        exchanges = list(self.exchanges())
        calls = list(self.calls())
        changes: list[Exchange | GraftedCall] = [*exchanges, *calls]
        ops: list[Any] = [change.op for change in changes]
        counts = {
            _PASSED_OVER: sum(type(exchange.module) is nn.Linear for exchange in exchanges),
            _FALLING_BACK: sum(fallback_of(op.forward) is not None for op in ops),
            _NOT_PATCHED: len({call.module for call in calls}),
            _NOT_FROZEN: sum(map(_freezing_pays, ops)),
        }
        yield from (note.format(count) for note, count in counts.items() if count)


def _freezing_pays(op: nn.Module) -> bool:
    """Return True for a linear layer with a kernel that is faster over a copy of the weight."""
    # A weight in training changes, and a declared weight is frozen already.
    if not isinstance(op, Linear) or op.training or declaration(op.weight):
        return False
    native = op.binding.kernel.winner.method == "forward_native"
    return not native and op.weight.is_cpu and pays_packed(op.weight)


def plan_of(model: nn.Module) -> GraftPlan:
    """Plan for each module below ``model``. The model is not changed.

    Raises:
        OpgraftError: a setting or a conflict prevents the choice of an implementation.
        GraftError: in strict mode, an adapter or the class of an op raised.
    """
    planner = _Planner(model)
    # Once for the whole walk. Otherwise each adapter replaces the handler of interrupts again.
    with interrupts_counted():
        entries = planner.below(model, "")
        if not model._modules and not is_attention(model):
            reason = "it is the model itself, which has no parent to be replaced in"
            entries.append(_left_alone("", model, reason))
        entries += planner.calls_of(model, "")
    return GraftPlan(tuple(entries), tuple(planner.places))


class _Failure(LeaveAlone):
    """The reason for a module or call to stay is an exception of a row or an op class."""


class _Planner:
    """Walks over a model bottom-up."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        provider = discover().provider_of(__name__)
        builtin = (*builtin_adapters(_dtypes_of(model)), *CALL_ADAPTERS)
        # The first row that knows a module decides, so rows of plugins come first.
        rows: list[tuple[Provider, Any]] = [*PLUGIN_ADAPTERS.get()]
        rows += [(provider, adapter) for adapter in builtin]
        self.adapters = [row for row in rows if isinstance(row[1], Adapter)]
        self.call_adapters = [row for row in rows if isinstance(row[1], CallAdapter)]
        self.strict = host_state().settings().config.strict
        self.read_by_parents = read_by_parents(model)
        devices = (parameter.device for parameter in model.parameters())
        self.device = next(devices, torch.get_default_device())
        self.becomes: dict[nn.Module, nn.Module] = {}
        self.places: list[ParentSlot] = []
        self.failed: set[tuple[int, int]] = set()

    def below(self, parent: nn.Module, path: str) -> list[Entry]:
        """Plan for all modules below a module."""
        entries: list[Entry] = []
        for name, child in parent._modules.items():
            if child is None:
                continue
            # A module in several places is planned once.
            if child not in self.becomes:
                self.becomes[child] = child
                entries += self._entries_of(child, joined_path(path, name))
            if self.becomes[child] is not child:
                self.places.append(ParentSlot(parent, name, self.becomes[child]))
        return entries

    def calls_of(self, module: nn.Module, path: str) -> list[Entry]:
        """Plan for the names in the code of a module's forward."""
        forward = plain_forward(module)
        if not isinstance(forward, FunctionType):
            return []

        entries: list[Entry] = []
        names = dict.fromkeys(forward.__code__.co_names)
        children = set(module._modules)

        for provider, adapter in self.call_adapters:
            # A copy, since known names are deleted.
            for name in list(names):
                child = adapter.child.format(name=name)
                # An op of this name would hide a child of the module.
                if child in children:
                    continue
                call = FunctionCall(module, name, forward.__globals__.get(name), self.model)
                try:
                    entry = self._call(call, path, provider, adapter, child)
                except _Failure as failure:
                    # A row that raises must not keep the name from the rows after it.
                    entries += self._first_failure(call, path, adapter, str(failure))
                    continue
                if entry is not None:
                    # The first adapter that knows a name decides.
                    del names[name]
                    children.add(child)
                    entries.append(entry)

        return entries

    def _first_failure(
        self, call: FunctionCall, path: str, adapter: CallAdapter, reason: str
    ) -> list[Entry]:
        """Report the first exception of a row, and of a row for whole modules one per module."""
        # A row that raises for one name most likely raises for all, and one report is enough.
        key = (id(adapter), id(call.module) if adapter.whole else 0)
        if key in self.failed:
            return []
        self.failed.add(key)
        return [_call_left_alone(call, path, adapter, reason)]

    def _call(
        self, call: FunctionCall, path: str, provider: Provider, adapter: CallAdapter, child: str
    ) -> Entry | None:
        """Plan the op for one name; ``None`` if the adapter does not know the name.

        Raises:
            _Failure: the adapter or the class of the op raised.
        """
        row = f"adapter {adapter.name!r} of {provider}"
        label = "" if adapter.whole else call.name

        try:
            with self._reporting(row):
                arguments = adapter.recognise(call)
            if arguments is None:
                return None
            if not reads_global(plain_forward(call.module), call.name):
                raise LeaveAlone(f"its forward reads no {call.name} of its file")
            with self._reporting(f"class {adapter.op.__qualname__} for {row}", OpgraftError):
                op = adapter.op(**arguments)
                # The names in the state dict must stay.
                _expect_no_tensors(op)
            if not adapter.native_gains:
                _expect_kernel(op)
        except _Failure:
            raise
        except LeaveAlone as verdict:
            return _call_left_alone(call, path, adapter, str(verdict))

        substitution = Substitution(call.name, child, adapter.substitute)
        return GraftedCall(path, call.module, label, adapter.name, provider, op, substitution)

    def _entries_of_op(self, op: CustomOp, path: str) -> list[Entry]:
        entries: list[Entry] = [_left_alone(path, op, "already an op")]
        # Modules within an op may call functions.
        for name, part in op.named_modules():
            if part is not op:
                entries += self.calls_of(part, joined_path(path, name))
        return entries

    def _entries_of(self, module: nn.Module, path: str) -> list[Entry]:
        if isinstance(module, CustomOp):
            return self._entries_of_op(module, path)
        # The children of a compiled module are compiled, too.
        if isinstance(module, torch.jit.ScriptModule):
            return [_left_alone(path, module, obstacle_of(module) or "")]

        below = self.below(module, path)

        try:
            exchange = self._exchange(module, path, below)
        except LeaveAlone as verdict:
            # Attention has an entry of its own among the calls.
            if not is_attention(module):
                below.append(_left_alone(path, module, str(verdict)))
            return [*below, *self.calls_of(module, path)]

        if exchange is None:
            return [*below, *self.calls_of(module, path)]

        self.becomes[module] = exchange.op
        # Children that the op does not take over lose their calls.
        remaining = set(exchange.op.modules())
        calls = [row for row in below if isinstance(row, GraftedCall) and row.module in remaining]
        return [*calls, exchange]

    def _exchange(self, module: nn.Module, path: str, below: list[Entry]) -> Exchange | None:
        """Plan the op in place of a module; ``None`` if no adapter knows a module with children.

        Raises:
            LeaveAlone: the module stays, with the reason.
        """
        reason = self.read_by_parents.get(module) or obstacle_of(module)
        if reason:
            # A container without tensors of its own is no loss, and needs no row.
            if not module._modules or module._parameters or parametrize.is_parametrized(module):
                raise LeaveAlone(reason)
            return None

        view = self._view(module)

        for provider, adapter in self.adapters:
            row = f"adapter {adapter.name!r} of {provider}"
            with self._reporting(row):
                arguments = adapter.recognise(view)
            if arguments is None:
                continue
            with self._reporting(f"class {adapter.op.__qualname__} for {row}", OpgraftError):
                op = build_op(adapter.op, arguments, view, self.device)
            # The children's exchanges happen with the op, which holds the children's ops.
            inside = tuple(entry for entry in below if isinstance(entry, Exchange))
            return Exchange(path, module, adapter.name, provider, arguments, op, inside)

        return None

    def _view(self, module: nn.Module) -> nn.Module:
        """Return a copy of a module with ops in place of children."""
        children = {name: child and self.becomes[child] for name, child in module._modules.items()}
        if children == module._modules:
            return module
        # Nobody has the arguments of the constructor.
        view: nn.Module = object.__new__(type(module))
        view.__dict__.update(vars(module), _modules=children)
        return view

    @contextmanager
    def _reporting(self, source: str, passed: type[Exception] = LeaveAlone) -> Iterator[None]:
        """Turn an exception of a plugin or a model into a reason to leave the module alone.

        Raises:
            _Failure: with that reason.
            GraftError: instead, in strict mode.
        """
        try:
            with exits_as_errors():
                yield
        except (Exception, SystemExit) as error:
            ended = exit_behind(error)
            if ended is None and isinstance(error, LeaveAlone | passed):
                raise
            reason = _blamed(source, ended or error)
            if self.strict:
                raise GraftError(
                    f"strict mode: {reason}. OPGRAFT_STRICT=0 leaves such modules as they are."
                ) from error
            raise _Failure(reason) from error


def _expect_no_tensors(op: nn.Module) -> None:
    """Raise ``LeaveAlone`` if a model with ``op`` as a new child would have further tensors."""
    tensors = [name for name, _ in (*op.named_parameters(), *op.named_buffers())]
    if tensors:
        raise LeaveAlone(
            f"{type(op).__qualname__} has tensors of its own, which the model's state_dict does "
            f"not have: {', '.join(tensors)}"
        )


def _expect_kernel(op: nn.Module) -> None:
    """Raise ``LeaveAlone`` if an op runs its native definition."""
    if isinstance(op, CustomOp) and op.binding.kernel.winner.method == "forward_native":
        name = op_name_of(op.op_class, host_state())
        raise LeaveAlone(f"here {name} is its native definition, which is no faster")


def _blamed(source: str, error: BaseException) -> str:
    """Name the plugin if its code raised an error, else the ``source`` of the call."""
    raised = explain_exception(error)
    if raised is None or not raised.of_plugin:
        return f"{source} raised {described(error)}"
    return f"{described(error)}, {raised}"


def _flat(exchanges: Iterator[Exchange]) -> Iterator[Exchange]:
    for exchange in exchanges:
        yield from _flat(iter(exchange.inside))
        yield exchange


def _labels(change: Exchange | GraftedCall) -> tuple[str, str]:
    """Return the path for the report, and the name of the replaced module or function."""
    if isinstance(change, GraftedCall) and change.function:
        return joined_path(change.path, change.function), change.function
    return change.path, type(change.module).__name__


def _left_alone(path: str, module: nn.Module, reason: str) -> LeftAlone:
    return LeftAlone(path, type(module).__name__, reason)


def _call_left_alone(call: FunctionCall, path: str, adapter: CallAdapter, reason: str) -> LeftAlone:
    if adapter.whole:
        return _left_alone(path, call.module, reason)
    return LeftAlone(joined_path(path, call.name), call.name, reason)


def _dtypes_of(model: nn.Module) -> Dtypes:
    """Return the dtypes of a model's parameters, among the dtypes for computing."""
    elements: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.dtype in _COMPUTED and not is_lazy(parameter):
            elements[parameter.dtype] += parameter.numel()
    if not elements:
        return Dtypes()
    usual = max(elements, key=elements.__getitem__)
    return Dtypes(usual, functools.reduce(torch.promote_types, elements))
