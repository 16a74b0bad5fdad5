"""What ``graft`` did to a model."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from opgraft.decision import Provider
from opgraft.text import WIDTH, table


@dataclass(frozen=True)
class Part:
    """An op inside a composite, under its path below the composite."""

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
    """How many ops one implementation serves."""

    op: str
    implementation: str
    provider: Provider
    count: int


@dataclass(frozen=True)
class GraftReport:
    """What was replaced, by which implementation of which provider, and what was left alone, and why.

    Attributes:
        replaced: one row per module that became an op, in the model's order. A module that stands in several places
            has one row, under its first path. A composite stands for the modules that it replaced, and names the ops
            that run when it is called without a gradient: an activation that a linear kernel computes on its way is
            not among them, nor are ops that stand by for training.
            The rotary function that a forward calls has a row of its own, under its name below the module's path.
        left_alone: one row per module that stayed as it was although it has no children or has parameters of its own,
            is attention, or is known to an adapter.
    """

    replaced: tuple[Replaced, ...] = ()
    left_alone: tuple[LeftAlone, ...] = ()

    def counts(self) -> tuple[Count, ...]:
        """How many ops each implementation serves, those inside composites too, the most frequent first."""
        counter = Counter((row.op, row.implementation, row.provider) for row in self.replaced)
        counter.update((part.op, part.implementation, part.provider) for row in self.replaced for part in row.parts)
        return tuple(Count(*key, count) for key, count in counter.most_common())

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, ready for ``json.dumps``."""
        return {
            "replaced": [asdict(row) for row in self.replaced],
            "left_alone": [asdict(row) for row in self.left_alone],
            "counts": [asdict(row) for row in self.counts()],
        }

    def __str__(self) -> str:
        return self.in_words()

    def in_words(self, width: int | None = WIDTH) -> str:
        """Counts of what was replaced and of what stayed, in tables that fit ``width``; ``None``: a line per row."""
        head = [f"{len(self.replaced)} modules replaced, {len(self.left_alone)} left alone"]
        served = [(str(row.count), row.op, f"{row.implementation} of {row.provider}") for row in self.counts()]
        if served:
            head += ["", *table([("count", "op", "implementation"), *served], width)]
        stayed = Counter((row.source, row.reason) for row in self.left_alone).most_common()
        if stayed:
            rows = [(str(count), source, reason) for (source, reason), count in stayed]
            head += ["", *table([("count", "left alone", "reason"), *rows], width)]
        return "\n".join(head)
