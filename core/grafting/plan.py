"""The plan of a graft: decided and written down as data, without changing the model."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from opgraft.base.text import described
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.marks import fallback_of
from opgraft.binding.provenance import explain_exception
from opgraft.errors import GraftError, OpgraftError
from opgraft.grafting import attention, direct_attention, rotary, scans
from opgraft.grafting.adapters import builtin_adapters
from opgraft.grafting.exchange import build_op
from opgraft.grafting.forwards import Substitution
from opgraft.grafting.norms import Dtypes
from opgraft.grafting.obstacles import obstacle_of, read_by_parents
from opgraft.grafting.report import GraftReport, LeftAlone, replaced_by
from opgraft.ops import ApplyRotaryEmb, Linear, ScaledDotProductAttention
from opgraft.ops.linear.packed import pays_packed
from opgraft.ops.linear.weight_cache import declaration
from opgraft.plugins.discovery import discover
from opgraft.registry.adapter import Adapter, LeaveAlone
from opgraft.registry.decision import Provider
from opgraft.registry.plugin_adapters import PLUGIN_ADAPTERS
from opgraft.registry.state import host_state
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

_PASSED_OVER = (
    "quantize_dynamic and other code for torch.nn.Linear does not find the {} that became ops: call "
    "such code before graft"
)
_NOT_PATCHED = (
    "{} of the forwards call ops in place of functions of their files: if you patch such a function "
    "from now on, call ungraft first"
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
        path: of the module, its first one if it stands in several places.
        module: the module.
        adapter: the name of the adapter that recognised it.
        provider: who provides that adapter.
        arguments: what the adapter makes the op of.
        op: the op, constructed; it has the module's tensors.
        inside: what becomes of the modules below, of which the op is made.
    """

    path: str
    module: nn.Module
    adapter: str
    provider: Provider
    arguments: Mapping[str, Any]
    op: nn.Module
    inside: tuple[Exchange, ...] = ()


@dataclass(frozen=True, eq=False)
class Call:
    """An op that the forward of a module is going to call, where it calls a function of its file now.

    Attributes:
        path: of the module.
        module: the module, which stays.
        function: the name of the function; empty where the op stands for all that the module computes.
        adapter: what recognised it.
        provider: who provides that.
        op: the op, constructed.
        substitution: how the forward finds the op.
    """

    path: str
    module: nn.Module
    function: str
    adapter: str
    provider: Provider
    op: CustomOp
    substitution: Substitution


Entry: TypeAlias = Exchange | Call | LeftAlone


@dataclass(frozen=True, eq=False)
class Place:
    """One name under which a parent is going to have an op."""

    parent: nn.Module
    name: str
    op: nn.Module


@dataclass(frozen=True, eq=False)
class Plan:
    """The changes that grafting is going to make.

    Attributes:
        entries: what becomes of each module, in the model's order, children before their parents.
        places: where the ops go.
    """

    entries: tuple[Entry, ...]
    places: tuple[Place, ...]

    def exchanges(self) -> Iterator[Exchange]:
        """Walk over the ops that take the place of modules, those inside others first."""
        yield from _flat(entry for entry in self.entries if isinstance(entry, Exchange))

    def calls(self) -> Iterator[Call]:
        """Walk over the ops that forwards are going to call."""
        yield from (entry for entry in self.entries if isinstance(entry, Call))

    def report(self, applied: bool) -> GraftReport:
        """Put the plan in words, before it is ``applied`` or after."""
        changes = sorted(
            (e for e in self.entries if not isinstance(e, LeftAlone)),
            key=lambda e: isinstance(e, Call),
        )
        replaced = tuple(replaced_by(e.op, *_labels(e), e.adapter, e.provider) for e in changes)
        left_alone = tuple(entry for entry in self.entries if isinstance(entry, LeftAlone))
        return GraftReport(replaced, left_alone, tuple(self._notes()), applied)

    def _notes(self) -> Iterator[str]:
        ops: list[Any] = [
            *(each.op for each in self.exchanges()),
            *(each.op for each in self.calls()),
        ]
        counts = {
            _PASSED_OVER: sum(type(exchange.module) is nn.Linear for exchange in self.exchanges()),
            _FALLING_BACK: sum(fallback_of(op.forward) is not None for op in ops),
            _NOT_PATCHED: len({call.module for call in self.calls()}),
            _NOT_FROZEN: sum(map(_freezing_pays, ops)),
        }
        yield from (note.format(count) for note, count in counts.items() if count)


def _freezing_pays(op: nn.Module) -> bool:
    """Return True for a linear layer whose kernel would compute faster over a copy of its weight."""
    if not isinstance(op, Linear) or op.training or declaration(op.weight):
        return False
    native = op.binding.kernel.winner.method == "forward_native"
    return not native and op.weight.is_cpu and pays_packed(op.weight)


def plan_of(model: nn.Module) -> Plan:
    """Decide what becomes of each module below ``model``, which is not changed.

    Raises:
        OpgraftError: a setting or a conflict prevents choosing an implementation.
        GraftError: in strict mode, an adapter or the class of an op raised.
    """
    planner = _Planner(model)
    entries = planner.below(model, "")
    if not model._modules and not attention.is_attention(model):
        entries.append(
            _left_alone("", model, "it is the model itself, which has no parent to be replaced in")
        )
    entries += planner.calls_of(model, "")
    return Plan(tuple(entries), tuple(planner.places))


class _Planner:
    """Walks over a model bottom-up."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.own = discover().provider_of(__name__)
        self.adapters: list[tuple[Provider, Adapter]] = [*PLUGIN_ADAPTERS.get()]
        self.adapters += [(self.own, adapter) for adapter in builtin_adapters(_dtypes_of(model))]
        self.strict = host_state().settings().config.strict
        self.read_by_parents = read_by_parents(model)
        self.device = next((p.device for p in model.parameters()), torch.get_default_device())
        self.becomes: dict[nn.Module, nn.Module] = {}
        self.places: list[Place] = []

    def below(self, parent: nn.Module, path: str) -> list[Entry]:
        """Plan for the children of a module and all that is below them."""
        entries: list[Entry] = []
        for name, child in parent._modules.items():
            if child is None:
                continue
            if child not in self.becomes:
                self.becomes[child] = (
                    child  # a module that stands in several places is planned once
                )
                entries += self._entries_of(child, _join(path, name))
            if self.becomes[child] is not child:
                self.places.append(Place(parent, name, self.becomes[child]))
        return entries

    def calls_of(self, module: nn.Module, path: str) -> list[Entry]:
        """Plan for the functions that the forward of a module calls."""
        entries: list[Entry] = []
        if attention.is_attention(module) and not attention.is_attached(module):
            entries.append(self._attention(module, path))
        if direct_attention.calls_attention(module):
            entries.append(self._direct_attention(module, path))
        name = rotary.function_of(module)
        if name is not None:
            entries.append(self._rotary(module, path, name))
        entries += [self._scan(module, path, name) for name in scans.functions_of(module)]
        return entries

    def _entries_of(self, module: nn.Module, path: str) -> list[Entry]:
        if isinstance(module, CustomOp):
            inside = [
                entry
                for name, part in module.named_modules()
                if name
                for entry in self.calls_of(part, _join(path, name))
            ]
            return [_left_alone(path, module, "already an op"), *inside]
        if isinstance(module, torch.jit.ScriptModule):
            return [_left_alone(path, module, obstacle_of(module) or "")]
        below = self.below(module, path)
        try:
            exchange = self._exchange(module, path, below)
        except LeaveAlone as verdict:
            own = (
                [] if attention.is_attention(module) else [_left_alone(path, module, str(verdict))]
            )
            return [*below, *own, *self.calls_of(module, path)]
        if exchange is None:
            return [*below, *self.calls_of(module, path)]
        self.becomes[module] = exchange.op
        remaining = set(exchange.op.modules())
        return [
            *(row for row in below if isinstance(row, Call) and row.module in remaining),
            exchange,
        ]

    def _exchange(self, module: nn.Module, path: str, below: list[Entry]) -> Exchange | None:
        """Plan the op that takes a module's place, ``None`` for a module of modules that no adapter knows.

        Raises:
            LeaveAlone: the module stays, for that reason.
        """
        reason = self.read_by_parents.get(module) or obstacle_of(module)
        if reason:
            if not module._modules or module._parameters or parametrize.is_parametrized(module):
                raise LeaveAlone(reason)
            return None
        view = self._view(module)
        for provider, adapter in self.adapters:
            with self._reporting(f"adapter {adapter.name!r} of {provider}"):
                arguments = adapter.recognise(view)
            if arguments is not None:
                break
        else:
            return None
        with self._reporting(
            f"class {adapter.op.__qualname__} for adapter {adapter.name!r} of {provider}",
            OpgraftError,
        ):
            op = build_op(adapter.op, arguments, view, self.device)
        inside = tuple(entry for entry in below if isinstance(entry, Exchange))
        return Exchange(path, module, adapter.name, provider, arguments, op, inside)

    def _view(self, module: nn.Module) -> nn.Module:
        """Show a module as it is going to be: with ops for children, where they become ops."""
        children = {name: child and self.becomes[child] for name, child in module._modules.items()}
        if children == module._modules:
            return module
        view: nn.Module = object.__new__(
            type(module)
        )  # nobody has the arguments of its constructor
        view.__dict__.update(vars(module), _modules=children)
        return view

    def _attention(self, module: nn.Module, path: str) -> Entry:
        try:
            with self._reporting(attention.ADAPTER):
                attention.check(module)
            with self._reporting(f"class {ScaledDotProductAttention.__name__}", OpgraftError):
                op = ScaledDotProductAttention()
        except LeaveAlone as verdict:
            return _left_alone(path, module, str(verdict))
        return Call(path, module, "", attention.ADAPTER, self.own, op, attention.SUBSTITUTION)

    def _direct_attention(self, module: nn.Module, path: str) -> Entry:
        try:
            with self._reporting(direct_attention.ADAPTER):
                direct_attention.check(module)
                substitution = direct_attention.substitution_of(module)
            with self._reporting(f"class {ScaledDotProductAttention.__name__}", OpgraftError):
                op = ScaledDotProductAttention()
            direct_attention.check_op(op)
        except LeaveAlone as verdict:
            return _left_alone(path, module, str(verdict))
        return Call(path, module, "", direct_attention.ADAPTER, self.own, op, substitution)

    def _rotary(self, module: nn.Module, path: str, name: str) -> Entry:
        try:
            with self._reporting(rotary.ADAPTER):
                rotary.check(module, name, self.model)
            with self._reporting(f"class {ApplyRotaryEmb.__name__}", OpgraftError):
                op = rotary.op_of(module, name)
            if op.binding.kernel.winner.method == "forward_native":
                raise LeaveAlone(
                    "here apply_rotary_emb is its native definition, which is no faster"
                )
        except LeaveAlone as verdict:
            return LeftAlone(_join(path, name), name, str(verdict))
        return Call(path, module, name, rotary.ADAPTER, self.own, op, rotary.substitution_of(name))

    def _scan(self, module: nn.Module, path: str, name: str) -> Entry:
        try:
            with self._reporting(scans.ADAPTER, OpgraftError):
                op = scans.op_of(module, name)
        except LeaveAlone as verdict:
            return LeftAlone(_join(path, name), name, str(verdict))
        return Call(path, module, name, scans.ADAPTER, self.own, op, scans.substitution_of(name))

    @contextmanager
    def _reporting(self, what: str, passed: type[Exception] = LeaveAlone) -> Iterator[None]:
        """Turn what the code of a plugin or of a model raises into a reason to leave the module alone.

        Raises:
            LeaveAlone: with that reason.
            GraftError: instead, in strict mode.
        """
        try:
            yield
        except (LeaveAlone, passed):
            raise
        except (Exception, SystemExit) as error:
            reason = _blamed(what, error)
            if self.strict:
                raise GraftError(
                    f"strict mode: {reason}. OPGRAFT_STRICT=0 leaves such modules as they are."
                ) from error
            raise LeaveAlone(reason) from error


def _blamed(what: str, error: BaseException) -> str:
    """Say who raised: the code of a plugin where that ran last, otherwise ``what`` was called."""
    raised = explain_exception(error)
    if raised is None or not raised.of_plugin:
        return f"{what} raised {described(error)}"
    return f"{described(error)}, {raised}"


def _flat(exchanges: Iterator[Exchange]) -> Iterator[Exchange]:
    for exchange in exchanges:
        yield from _flat(iter(exchange.inside))
        yield exchange


def _labels(change: Exchange | Call) -> tuple[str, str]:
    """Give the path that the report shows, and what was there before."""
    if isinstance(change, Call) and change.function:
        return _join(change.path, change.function), change.function
    return change.path, type(change.module).__name__


def _join(path: str, name: str) -> str:
    return f"{path}.{name}".lstrip(".")


def _left_alone(path: str, module: nn.Module, reason: str) -> LeftAlone:
    return LeftAlone(path, type(module).__name__, reason)


def _dtypes_of(model: nn.Module) -> Dtypes:
    """Find the dtypes that a model's parameters have, among those that models compute in."""
    elements: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.dtype in _COMPUTED and not is_lazy(parameter):
            elements[parameter.dtype] += parameter.numel()
    if not elements:
        return Dtypes()
    return Dtypes(
        max(elements, key=elements.__getitem__), functools.reduce(torch.promote_types, elements)
    )
