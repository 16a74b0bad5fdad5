"""The report of a model that runs through transformers: what became of its modules, and what stayed as it was."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from opgraft.base.text import WIDTH, table
from opgraft.grafting.attention import CHILD
from opgraft.grafting.report import GraftReport, LeftAlone
from opgraft.models.transformers_layers import Cut

_OURS = "already an op"


@dataclass(frozen=True)
class TransformersReport:
    """The layers that took the places of modules, and what stayed as it was and why.

    Attributes:
        layers: linear layers, embeddings and the output layer that are ours now.
        kept: what is whole on every rank though the plan cuts it, and what has no cache.
        attention: paths of the modules that call our attention layers.
        grafted: what ``graft`` did with the rest.
    """

    layers: tuple[Cut, ...]
    kept: tuple[LeftAlone, ...]
    attention: tuple[str, ...]
    grafted: GraftReport

    @property
    def left_alone(self) -> tuple[LeftAlone, ...]:
        """All that stayed as it was."""
        inside = f".{CHILD}."  # parts of our own layers
        rows = self.grafted.left_alone
        return (
            *self.kept,
            *(row for row in rows if row.reason != _OURS and inside not in row.path),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, ready for ``json.dumps``."""
        return {
            "layers": [asdict(row) for row in self.layers],
            "attention": list(self.attention),
            "left_alone": [asdict(row) for row in self.left_alone],
            "grafted": self.grafted.to_dict(),
        }

    def __str__(self) -> str:
        counted = Counter((row.source, row.layer) for row in self.layers).most_common()
        rows = [(str(count), source, layer) for (source, layer), count in counted]
        replaced = Counter((row.source, row.op) for row in self.grafted.replaced).most_common()
        rows += [(str(count), source, op) for (source, op), count in replaced]
        text = [f"{len(self.attention)} modules call our attention layers", ""]
        text += table([("count", "module", "became"), *rows], WIDTH)
        stayed = Counter((row.source, row.reason) for row in self.left_alone).most_common()
        if stayed:
            kept = [(str(count), source, reason) for (source, reason), count in stayed]
            text += ["", *table([("count", "left alone", "reason"), *kept], WIDTH)]
        return "\n".join(text)
