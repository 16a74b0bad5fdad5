"""The report of ``pack`` on a model."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from opgraft.base.text import table


@dataclass(frozen=True)
class Packed:
    """One linear layer that holds its weight packed only, and the bytes that the plain one took."""

    path: str
    bytes: int


@dataclass(frozen=True)
class Plain:
    """One linear layer that kept its plain weight, and why."""

    path: str
    source: str
    reason: str


@dataclass(frozen=True)
class PackReport:
    """The linear layers that hold their weights packed only, and those that kept the plain ones, and why.

    Attributes:
        packed: one row per layer that is packed now, those that were before among them, in the model's order. A layer
            that stands in several places has one row, under its first path.
        kept: one row per linear layer that is not.
    """

    packed: tuple[Packed, ...] = ()
    kept: tuple[Plain, ...] = ()

    def total_bytes(self) -> int:
        """Sum the bytes that the plain weights of the packed layers took."""
        return sum(row.bytes for row in self.packed)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, ready for ``json.dumps``."""
        return {
            "packed": [asdict(row) for row in self.packed],
            "kept": [asdict(row) for row in self.kept],
            "bytes": self.total_bytes(),
        }

    def __str__(self) -> str:
        size = f"{self.total_bytes() / 2**20:,.1f} MiB"
        head = [
            f"{len(self.packed)} weights packed, whose plain ones took {size}; {len(self.kept)} kept plain"
        ]
        stayed = Counter((row.source, row.reason) for row in self.kept).most_common()
        if stayed:
            first = {
                (row.source, row.reason): row.path or "the model itself"
                for row in reversed(self.kept)
            }
            counted = [(str(count), kind[0], first[kind], kind[1]) for kind, count in stayed]
            head += ["", *table([("count", "kept plain", "the first", "reason"), *counted])]
        return "\n".join(head)
