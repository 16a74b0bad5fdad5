"""The kernels that a built model runs, the classes that plugins may replace in it, and why these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from inspect import isabstract
from typing import Any

from opgraft.base.text import printable, table
from opgraft.binding.arguments import expect_module
from opgraft.binding.custom_op import CustomOp, PluggableLayer
from opgraft.binding.form_choice import choice_of
from opgraft.binding.names import op_name_of
from opgraft.binding.pluggable_class import PluggableClass, choose_class
from opgraft.binding.reach import idle_children
from opgraft.binding.rebinding import hidden_by
from opgraft.binding.specialisation import Binding
from opgraft.plugins.discovery import discover
from opgraft.registry.decision import Provider
from opgraft.registry.state import host_state
from torch import nn

_SPARED = "not run, as the layer that it is in does its work where no gradient is required"
_UNCALLED = "not called, as another layer computes with its weight"


@dataclass(frozen=True)
class ExplainedOp:
    """One op of a model, or a functional form that one of its layers runs.

    Attributes:
        path: of the module in the model, "" for the model itself.
        op: the name that settings know it by, or "" where its class is not registered.
        op_class: its class, a replacement perhaps.
        kernel: the class that defines its kernel and the method, such as ``RMSNorm.forward_native``.
        provider: who provides the kernel.
        reason: why that kernel, or what runs in its place.
        runs: ``False`` where another layer does its work, as long as no gradient is required.
    """

    path: str
    op: str
    op_class: str
    kernel: str
    provider: Provider
    reason: str
    runs: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data, with the names that all JSON of opgraft has for it."""
        return {
            "path": self.path,
            "op": self.op,
            "class": self.op_class,
            "kernel": self.kernel,
            "provider": self.provider.to_dict(),
            "reason": self.reason,
            "runs": self.runs,
        }


@dataclass(frozen=True)
class ExplainedClass:
    """An object of a class that plugins may replace as a whole, such as the sampler of an engine.

    Attributes:
        path: where it stands: in the engine, or in the model.
        name: the name that settings know its class by.
        cls: its class, a replacement perhaps.
        provider: who provides the class.
        reason: why that class.
        remark: what it says of itself, such as how often it did its work, and why not more often.
    """

    path: str
    name: str
    cls: str
    provider: Provider
    reason: str
    remark: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data."""
        return {
            "path": self.path,
            "name": self.name,
            "class": self.cls,
            "provider": self.provider.to_dict(),
            "reason": self.reason,
            "remark": self.remark,
        }


@dataclass(frozen=True)
class Explanation:
    """The ops of a model and the replaceable classes around them, one row each; printed, equal ones are one line.

    Attributes:
        rows: the ops, in the model's order.
        classes: objects of the engine, then of the model.
    """

    rows: tuple[ExplainedOp, ...]
    classes: tuple[ExplainedClass, ...] = ()

    def within(self, **objects: Any) -> Explanation:
        """Return the same with the given objects before the others, by what they are called, if they have a row."""
        return replace(self, classes=(*_classes(objects.items()), *self.classes))

    def to_dict(self) -> dict[str, Any]:
        """Return the tables as plain data, ready for ``json.dumps``."""
        return {
            "ops": [row.to_dict() for row in self.rows],
            "classes": [row.to_dict() for row in self.classes],
        }

    def __str__(self) -> str:
        ops = (
            _printed_ops(self.rows)
            if self.rows
            else ["no module of this model is an op: see opgraft.graft"]
        )
        return "\n".join([*ops, *(["", *_printed_classes(self.classes)] if self.classes else [])])


def _printed_ops(rows: Sequence[ExplainedOp]) -> Iterator[str]:
    running = [row for row in rows if row.runs]
    yield from _counted(
        ("op", "class", "kernel", "provider"),
        [
            ((row.op, row.op_class, row.kernel, str(row.provider)), row.path or "(model)")
            for row in running
        ],
    )
    yield ""
    for (kernel, reason), count in Counter((row.kernel, row.reason) for row in running).items():
        yield printable(f"{count} x {kernel}: {reason}")
    resting = [
        (row.op_class, row.path.rpartition(".")[2], row.reason) for row in rows if not row.runs
    ]
    for (cls, name, reason), count in Counter(resting).items():
        yield printable(f"{count} x {cls} as {name}: {reason}")


def _printed_classes(rows: Sequence[ExplainedClass]) -> Iterator[str]:
    yield from _counted(
        ("class by name", "class", "provider", "remark"),
        [((row.name, row.cls, str(row.provider), row.remark), row.path) for row in rows],
    )


def _counted(names: Sequence[str], rows: Sequence[tuple[tuple[str, ...], str]]) -> list[str]:
    """Lay out rows of cells with their count and the first path of each."""
    first = dict(reversed(rows))
    counts = Counter(cells for cells, _ in rows)
    return table(
        [
            ("count", *names, "the first"),
            *((str(n), *key, first[key]) for key, n in counts.items()),
        ],
        None,
    )


def explain(model: nn.Module) -> Explanation:
    """Tell which kernel each op of ``model`` is bound to, who provides it, and why.

    A module that stands in several places has one row, under its first path. Where an ``AttentionBatch`` is set, that
    is what calls of the model with it run.

    Raises:
        TypeError: ``model`` is no module.
    """
    expect_module("explain", model)
    run = _run(model)
    rows: list[ExplainedOp] = []
    classes: list[ExplainedClass] = []
    for path, module in model.named_modules():
        if isinstance(module, CustomOp):
            rows += _rows(path, module, module in run)
        prefix = f"{path}." if path else ""
        own = ((f"{prefix}{name}", value) for name, value in vars(module).items())
        classes += _classes([(path or "model", module), *own], module)
    return Explanation(tuple(rows), tuple(classes))


def _run(model: nn.Module) -> set[nn.Module]:
    """Collect the modules that a call of ``model`` may reach in one place at least."""
    reached = {model}
    left = [model]
    while left:
        layer = left.pop()
        idle = idle_children(layer) if isinstance(layer, PluggableLayer) else ()
        further = {child for name, child in layer.named_children() if name not in idle} - reached
        reached |= further
        left += further
    return reached


def _rows(path: str, op: CustomOp, reached: bool) -> Iterator[ExplainedOp]:
    """Yield the row of an op, and one for each form that it runs beside its children."""
    layer = op if isinstance(op, PluggableLayer) else None
    row = _row(path, op.op_class, op.binding, op.binding.kernel_name)
    if not reached:
        yield replace(row, reason=_SPARED, runs=False)
        return
    called = layer is None or layer.called
    yield (
        replace(row, reason=hidden_by(op) or row.reason)
        if called
        else replace(row, reason=_UNCALLED, runs=False)
    )
    for form in layer.forms() if layer else ():
        runs = choice_of(form)
        form_row = _row(path, runs.op_class, runs.binding, runs.kernel_name)
        yield replace(form_row, provider=runs.provider, reason=runs.reason)


def _row(path: str, cls: type, binding: Binding, kernel: str) -> ExplainedOp:
    name = op_name_of(binding.replacement.target, host_state()) or ""
    decision = binding.decision
    reason = f"{decision.candidates[0].reason}; {decision.reason}"  # the winner's own comes first
    return ExplainedOp(path, name, cls.__qualname__, kernel, binding.provider, reason)


def _classes(objects: Iterable[tuple[str, Any]], owner: object = None) -> Iterator[ExplainedClass]:
    """Yield the rows of those objects whose classes plugins may replace."""
    names = {record.cls: name for name, record in host_state().registry.classes.items()}
    for path, thing in objects:
        target = next((base for base in type(thing).__mro__ if base in names), None)
        if isinstance(thing, PluggableClass) and target is not None:
            provider, reason = _whose(type(thing), target)
            yield ExplainedClass(
                path, names[target], type(thing).__qualname__, provider, reason, thing.remark(owner)
            )


def _whose(cls: type, target: type) -> tuple[Provider, str]:
    """Return who provides the class of an object that was constructed for ``target``, and why it has that class."""
    choice = choose_class(target)
    if choice.cls is cls:
        return choice.provider, choice.decision.reason
    provider = discover().provider_of(cls.__module__)
    if isabstract(choice.cls):  # of whose kinds settings choose one
        return provider, choice.decision.reason
    return provider, f"constructed as it is; now {choice.cls.__qualname__} would be"
