"""The report of ``graft``: rows for replaced modules and for all others."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from opgraft.base.text import WIDTH, html_table, html_text, table
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.names import op_name_of
from opgraft.binding.reach import idle_children, reaches
from opgraft.ops.composites.composite import Composite, served_by
from opgraft.ops.composites.joint import JointLayer
from opgraft.registry.decision import Provider
from opgraft.registry.state import host_state
from torch import nn


@dataclass(frozen=True)
class Part:
    """An op inside a composite: the path there, or the paths of all layers in one call."""

    path: str
    op: str
    implementation: str
    provider: Provider


@dataclass(frozen=True)
class ReplacedModule:
    """One replaced module: the op, the kernel, the kernel's provider, and the ops inside."""

    path: str
    source: str
    adapter: str
    op: str
    implementation: str
    provider: Provider
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True)
class LeftAlone:
    """One unchanged module, and the reason."""

    path: str
    source: str
    reason: str


@dataclass(frozen=True)
class Count:
    """The number of ops of one implementation."""

    op: str
    implementation: str
    provider: Provider
    count: int


@dataclass(frozen=True)
class GraftReport:
    """The replaced modules with implementation and provider, and the other modules with a reason.

    Attributes:
        replaced: one row per replaced module, in the model's order, then one row per
            function that a forward leaves to an op. A module in several places has one row, under
            the first path. A composite has one row for all modules inside. The row names the ops
            that run in a call without a gradient. An activation that a linear kernel computes has
            no part in the row, and neither have ops for training only. Linear layers in one call,
            such as gate and up of an MLP, are one op. Attention has the path of the module; a
            rotary function has a name below that path.
        left_alone: one row per unchanged module without children, with parameters of its own, of
            attention, or known to an adapter.
        notes: surprises for code that works on the model later, and the next step to a faster
            model.
        applied: False for a dry run, which replaces nothing.
    """

    replaced: tuple[ReplacedModule, ...] = ()
    left_alone: tuple[LeftAlone, ...] = ()
    notes: tuple[str, ...] = ()
    applied: bool = True

    def counts(self) -> tuple[Count, ...]:
        """Count the ops of each implementation, also inside composites, the most frequent first."""
        counter: Counter[tuple[str, str, Provider]] = Counter()
        # Ops before parts: equal counts keep the order of their first op.
        counter.update(map(_implementation, self.replaced))
        for row in self.replaced:
            counter.update(map(_implementation, row.parts))
        return tuple(Count(*key, count) for key, count in counter.most_common())

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, ready for ``json.dumps``."""
        return {
            "replaced": [asdict(row) for row in self.replaced],
            "left_alone": [asdict(row) for row in self.left_alone],
            "counts": [asdict(row) for row in self.counts()],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        notes = ["\n" + textwrap.fill(note, WIDTH) for note in self.notes]
        return "\n".join([self.tables(), *notes])

    def __repr__(self) -> str:
        return f"<GraftReport: {self._head()}>"

    def _repr_html_(self) -> str:
        """Return the report for a notebook."""
        tables = [html_table(rows) for rows in self._tables()]
        return "".join([html_text(self._head()), *tables, *map(html_text, self.notes)])

    def tables(self, width: int | None = WIDTH) -> str:
        """Return the report as text without the notes.

        Args:
            width: of the tables; with ``None``, each row has one line.
        """
        lines = [self._head()]
        for rows in self._tables():
            lines += ["", *table(rows, width)]
        return "\n".join(lines)

    def _head(self) -> str:
        verb = "replaced" if self.applied else "would be replaced"
        return f"{len(self.replaced)} modules {verb}, {len(self.left_alone)} left alone"

    def _tables(self) -> Iterator[list[tuple[str, ...]]]:
        """Yield the tables with rows, each with a header first."""
        served: list[tuple[str, ...]] = [("count", "op", "implementation")]
        for row in self.counts():
            implementation = f"{row.implementation} of {row.provider}"
            served.append((str(row.count), row.op, implementation))

        stayed: list[tuple[str, ...]] = [("count", "left alone", "reason")]
        counter = Counter((row.source, row.reason) for row in self.left_alone)
        for (source, reason), count in counter.most_common():
            stayed.append((str(count), source, reason))

        yield from (rows for rows in (served, stayed) if len(rows) > 1)


def _implementation(row: ReplacedModule | Part) -> tuple[str, str, Provider]:
    return row.op, row.implementation, row.provider


def replaced_by(
    op: nn.Module, path: str, source: str, adapter: str, provider: Provider
) -> ReplacedModule:
    """Describe an op in place of a ``source``; ``provider`` is for an op without a binding."""
    parts = tuple(_ops_inside(op))
    if isinstance(op, CustomOp):
        return ReplacedModule(path, source, adapter, *_served(op), parts)
    cls = type(op)
    implementation = f"{cls.__qualname__}.forward"
    return ReplacedModule(path, source, adapter, cls.__name__, implementation, provider, parts)


def _ops_inside(op: nn.Module) -> Iterator[Part]:
    """Yield the ops inside an op for calls without a gradient."""
    idle: set[nn.Module] = set()
    for layer in op.modules():
        if isinstance(layer, Composite):
            idle.update(layer.get_submodule(name) for name in idle_children(layer))

    joint = _computed_at_once(op)

    # Layers in one call but the first have an empty path.
    for name, part in op.named_modules():
        if part is op or part in idle or not isinstance(part, CustomOp):
            continue
        path = joint.get(name, name)
        if path:
            yield Part(path, *_served(part))


def _computed_at_once(op: nn.Module) -> dict[str, str]:
    """Map the paths of layers in one call: the first one to all paths, the others to ""."""
    joined: dict[str, str] = {}
    for path, layer in op.named_modules():
        if not isinstance(layer, JointLayer) or not reaches(layer, "joint_op"):
            continue
        paths = [f"{path}.{name}".lstrip(".") for name in layer.computed_at_once()]
        if not paths:
            continue
        # One row for the call, so the other layers have no path.
        joined |= dict.fromkeys(paths, "")
        joined[paths[0]] = " and ".join(paths)
    return joined


def _served(op: CustomOp) -> tuple[str, str, Provider]:
    """Return the name of an op, the kernel, and the provider of the kernel."""
    name = op_name_of(op.op_class, host_state()) or op.op_class.__name__
    return name, str(op.binding.kernel.winner), served_by(op)
