"""``explain``: tables of a model's kernels and of its replaceable classes, with the reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import isabstract
from typing import Any

from opgraft.base.text import printable, table
from opgraft.binding.arguments import expect_module
from opgraft.binding.custom_op import CustomOp, PluggableLayer
from opgraft.binding.form_choice import choice_of
from opgraft.binding.names import op_name_of
from opgraft.binding.pluggable_class import PluggableClass, choose_class
from opgraft.binding.reach import computed_with_another, idle_children
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
    """One op of a model, or a functional form of one of the model's layers.

    Attributes:
        path: the place of the module in the model, "" for the model itself.
        op: the name in settings; "" if the class is not registered.
        op_class: the class, a replacement perhaps.
        kernel: class and method of the kernel, such as ``RMSNorm.forward_native``.
        provider: the provider of the kernel.
        reason: why the op runs this kernel, or other code in its place.
        runs: ``False`` if another layer does the op's work, as long as no gradient is required.
    """

    path: str
    op: str
    op_class: str
    kernel: str
    provider: Provider
    reason: str
    runs: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data, with the names of all JSON of opgraft."""
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
    """An object of a replaceable class, such as the sampler of an engine.

    Attributes:
        path: the place of the object in the engine, or in the model.
        name: the name of the class in settings.
        cls: the class, a replacement perhaps.
        provider: the provider of the class.
        reason: why the object has this class.
        remark: the remark of the object, such as the number of calls, and the reason for few.
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
    """The ops of a model and the objects of replaceable classes, a row for each.

    Printing an explanation shows equal rows as one line with a count.

    Attributes:
        rows: the ops, in the model's order.
        classes: objects of the engine, then of the model.
    """

    rows: tuple[ExplainedOp, ...]
    classes: tuple[ExplainedClass, ...] = ()

    def within(self, **objects: Any) -> Explanation:
        """Return the explanation with rows for more objects, before the other objects.

        Args:
            **objects: objects by path; those of other classes have no row.
        """
        further = _classes(objects.items())
        return replace(self, classes=(*further, *self.classes))

    def with_ops(self, ops: Mapping[str, nn.Module]) -> Explanation:
        """Return the explanation with rows for ops by path, behind the other ops."""
        further = [replace(row, path=path) for path, op in ops.items() for row in explain(op).rows]
        return replace(self, rows=(*self.rows, *further))

    def to_dict(self) -> dict[str, Any]:
        """Return the tables as plain data, ready for ``json.dumps``."""
        return {
            "ops": [row.to_dict() for row in self.rows],
            "classes": [row.to_dict() for row in self.classes],
        }

    def __str__(self) -> str:
        lines = ["no module of this model is an op: see opgraft.graft"]
        if self.rows:
            lines = list(_printed_ops(self.rows))
        if self.classes:
            lines += ["", *_printed_classes(self.classes)]
        return "\n".join(lines)


def _printed_ops(rows: Sequence[ExplainedOp]) -> Iterator[str]:
    """Yield the table of the running ops, the reasons for their kernels, and the resting ops."""
    running = []
    reasons: Counter[tuple[str, str]] = Counter()
    resting: Counter[tuple[str, str, str]] = Counter()
    for row in rows:
        if row.runs:
            cells = (row.op, row.op_class, row.kernel, str(row.provider))
            running.append((cells, row.path or "(model)"))
            reasons[row.kernel, row.reason] += 1
        else:
            _, _, name = row.path.rpartition(".")
            resting[row.op_class, name, row.reason] += 1
    yield from _counted(("op", "class", "kernel", "provider"), running)
    yield ""
    for (kernel, reason), count in reasons.items():
        yield printable(f"{count} x {kernel}: {reason}")
    for (cls, name, reason), count in resting.items():
        yield printable(f"{count} x {cls} as {name}: {reason}")


def _printed_classes(rows: Sequence[ExplainedClass]) -> list[str]:
    names = ("class by name", "class", "provider", "remark")
    cells = [((row.name, row.cls, str(row.provider), row.remark), row.path) for row in rows]
    return _counted(names, cells)


def _counted(names: Sequence[str], rows: Sequence[tuple[tuple[str, ...], str]]) -> list[str]:
    """Lay out a table with one line for equal rows: the count, the cells, the first path.

    Args:
        names: the titles of the cells.
        rows: the cells and the path of each row.
    """
    # The last entry of a key stays in a dictionary, and the first path is wanted.
    first = dict(reversed(rows))
    counts = Counter(cells for cells, _ in rows)
    lines = [("count", *names, "the first")]
    for cells, count in counts.items():
        lines.append((str(count), *cells, first[cells]))
    return table(lines, None)


def explain(model: nn.Module) -> Explanation:
    """Return the kernel of each op of ``model``, with provider and reason.

    A module in several places has one row, under the first path. If an ``AttentionBatch`` is set,
    the rows hold for calls of the model with the batch.

    Raises:
        TypeError: ``model`` is no module.
    """
    expect_module("explain", model)
    reached = _modules_reached(model)
    rows: list[ExplainedOp] = []
    classes: list[ExplainedClass] = []
    for path, module in model.named_modules():
        if isinstance(module, CustomOp):
            rows += _rows_of_op(path, module, module in reached)
        # A weight method and the like are plain attributes of a module.
        prefix = f"{path}." if path else ""
        objects = [(path or "model", module)]
        objects += [(f"{prefix}{name}", value) for name, value in vars(module).items()]
        classes += _classes(objects, module)
    return Explanation(tuple(rows), tuple(classes))


def _modules_reached(model: nn.Module) -> set[nn.Module]:
    """Collect the modules that a call of ``model`` may reach in at least one place."""
    reached = {model}
    left = [model]
    while left:
        layer = left.pop()
        idle: frozenset[str] = frozenset()
        if isinstance(layer, PluggableLayer):
            idle = idle_children(layer) | computed_with_another(layer)
        for name, child in layer.named_children():
            if name not in idle and child not in reached:
                reached.add(child)
                left.append(child)
    return reached


def _rows_of_op(path: str, op: CustomOp, is_reached: bool) -> Iterator[ExplainedOp]:
    """Yield the row of an op, then a row for each form that a layer calls beside its children."""
    row = _explained_op(path, op.op_class, op.binding, op.binding.kernel_name)
    if not is_reached:
        yield replace(row, reason=_SPARED, runs=False)
        return
    if isinstance(op, PluggableLayer) and not op.called:
        yield replace(row, reason=_UNCALLED, runs=False)
    else:
        yield replace(row, reason=hidden_by(op) or row.reason)
    if not isinstance(op, PluggableLayer):
        return
    for form in op.forms():
        choice = choice_of(form)
        form_row = _explained_op(path, choice.op_class, choice.binding, choice.kernel_name)
        yield replace(form_row, provider=choice.provider, reason=choice.reason)


def _explained_op(path: str, cls: type, binding: Binding, kernel: str) -> ExplainedOp:
    name = op_name_of(binding.replacement.target, host_state()) or ""
    decision = binding.decision
    # The winner is the first candidate.
    reason = f"{decision.candidates[0].reason}; {decision.reason}"
    return ExplainedOp(path, name, cls.__qualname__, kernel, binding.provider, reason)


def _classes(objects: Iterable[tuple[str, Any]], owner: object = None) -> Iterator[ExplainedClass]:
    """Yield the rows of the objects of replaceable classes.

    Args:
        objects: any objects, each with a path.
        owner: the module with the objects as attributes; ``None`` for parts of the engine.
    """
    names = {record.cls: name for name, record in host_state().registry.classes.items()}
    for path, thing in objects:
        if not isinstance(thing, PluggableClass):
            continue
        cls = type(thing)
        target = next((base for base in cls.__mro__ if base in names), None)
        if target is None:
            continue
        provider, reason = _origin(cls, target)
        remark = thing.remark(owner)
        yield ExplainedClass(path, names[target], cls.__qualname__, provider, reason, remark)


def _origin(cls: type, target: type) -> tuple[Provider, str]:
    """Return the provider of an object's class, and why the object has the class.

    Args:
        cls: the class of the object.
        target: the class that was called to construct the object.
    """
    choice = choose_class(target)
    if choice.cls is cls:
        return choice.provider, choice.decision.reason
    provider = discover().provider_of(cls.__module__)
    # Settings choose one of the classes below an abstract one.
    if isabstract(choice.cls):
        return provider, choice.decision.reason
    return provider, f"constructed as it is; now {choice.cls.__qualname__} would be"
