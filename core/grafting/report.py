"""The report of ``graft``: rows for what was replaced and for what was left alone."""

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
    """An op inside a composite, under its path there, or the paths of layers in one call."""

    path: str
    op: str
    implementation: str
    provider: Provider


@dataclass(frozen=True)
class Replaced:
    """One module that became an op: the kernel that serves it, who provides that, and the ops that it is made of."""

    path: str
    source: str
    adapter: str
    op: str
    implementation: str
    provider: Provider
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True)
class LeftAlone:
    """One module that stayed as it was, and why."""

    path: str
    source: str
    reason: str


@dataclass(frozen=True)
class Count:
    """The number of ops that one implementation serves."""

    op: str
    implementation: str
    provider: Provider
    count: int


@dataclass(frozen=True)
class GraftReport:
    """The modules that were replaced, by which implementation of which provider, and those left alone, and why.

    Attributes:
        replaced: one row per module that became an op, in the model's order, then one per function that a forward
            leaves to an op. A module that stands in several places has one row, under its first path.
            A composite stands for the modules that it replaced, and names the ops that run when it is called without a
            gradient: an activation that a linear kernel computes on its way is not among them, nor are
            ops that stand by for training. Linear layers in one call, such as gate and up of an MLP,
            are one op.
            Attention has the path of its module, a rotary function its name below that.
        left_alone: one row per module that stayed as it was although it has no children or has parameters of its own,
            is attention, or is known to an adapter.
        notes: surprises for code that works on the model afterwards, and the next step that makes it faster.
        applied: ``False`` for a dry run, which has replaced nothing.
    """

    replaced: tuple[Replaced, ...] = ()
    left_alone: tuple[LeftAlone, ...] = ()
    notes: tuple[str, ...] = ()
    applied: bool = True

    def counts(self) -> tuple[Count, ...]:
        """Count the ops that each implementation serves, those inside composites too, the most frequent first."""
        counter = Counter((row.op, row.implementation, row.provider) for row in self.replaced)
        counter.update(
            (part.op, part.implementation, part.provider)
            for row in self.replaced
            for part in row.parts
        )
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
        return "\n".join(
            [self.tables(), *("\n" + textwrap.fill(note, WIDTH) for note in self.notes)]
        )

    def __repr__(self) -> str:
        return f"<GraftReport: {self._head()}>"

    def _repr_html_(self) -> str:
        """Return the report for a notebook."""
        tables = [html_table(rows) for rows in self._tables()]
        return "".join([html_text(self._head()), *tables, *map(html_text, self.notes)])

    def tables(self, width: int | None = WIDTH) -> str:
        """Return the report as text, without the notes, in tables that fit ``width``; ``None``: a line per row."""
        lines = [self._head()]
        for rows in self._tables():
            lines += ["", *table(rows, width)]
        return "\n".join(lines)

    def _head(self) -> str:
        verb = "replaced" if self.applied else "would be replaced"
        return f"{len(self.replaced)} modules {verb}, {len(self.left_alone)} left alone"

    def _tables(self) -> Iterator[list[tuple[str, ...]]]:
        """Yield the tables that have rows, each with its header first."""
        served = [
            (str(row.count), row.op, f"{row.implementation} of {row.provider}")
            for row in self.counts()
        ]
        if served:
            yield [("count", "op", "implementation"), *served]
        stayed = Counter((row.source, row.reason) for row in self.left_alone).most_common()
        if stayed:
            rows = [(str(count), source, reason) for (source, reason), count in stayed]
            yield [("count", "left alone", "reason"), *rows]


def replaced_by(
    op: nn.Module, path: str, source: str, adapter: str, provider: Provider
) -> Replaced:
    """Describe an op in the place of a ``source``; ``provider`` answers for what is no ``CustomOp``."""
    idle = {
        layer.get_submodule(name)
        for layer in op.modules()
        if isinstance(layer, Composite)
        for name in idle_children(layer)
    }
    inside = [
        (name, part)
        for name, part in op.named_modules()
        if part is not op and isinstance(part, CustomOp)
    ]
    joint = _computed_at_once(op)
    parts = tuple(
        Part(joint.get(name, name), *_served(part))
        for name, part in inside
        if part not in idle and joint.get(name) != ""
    )
    if not isinstance(op, CustomOp):
        name = type(op).__name__
        return Replaced(
            path, source, adapter, name, f"{type(op).__qualname__}.forward", provider, parts
        )
    return Replaced(path, source, adapter, *_served(op), parts)


def _computed_at_once(op: nn.Module) -> dict[str, str]:
    """Return the paths of layers in one call: the first has all paths, others none."""
    found: dict[str, str] = {}
    for path, layer in op.named_modules():
        if not isinstance(layer, JointLayer) or not reaches(layer, "joint_op"):
            continue
        paths = [f"{path}.{name}".lstrip(".") for name in layer.computed_at_once()]
        found |= dict.fromkeys(paths, "")
        if paths:
            found[paths[0]] = " and ".join(paths)
    return found


def _served(op: CustomOp) -> tuple[str, str, Provider]:
    """Give the name of an op, its kernel, and who provides that."""
    name = op_name_of(op.op_class, host_state()) or op.op_class.__name__
    return name, str(op.binding.kernel.winner), served_by(op)
