"""The report of a model of transformers: the modules that were replaced, and those that stayed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from opgraft.base.text import WIDTH, table
from opgraft.grafting.attention import CHILD
from opgraft.grafting.report import GraftReport, LeftAlone
from opgraft.models.transformers_layers import Cut

_OURS = "already an op"


@dataclass(frozen=True)
class TransformersReport:
    """The layers in the place of modules, and the modules that stayed, each with the reason.

    Attributes:
        layers: replaced linear layers, embeddings and output layer.
        kept: layers that are whole on every rank though the plan cuts them, and attention without
            a cache.
        attention: paths of the modules that call our attention layers.
        grafted: the report of ``graft`` on the other modules.
    """

    layers: tuple[Cut, ...]
    kept: tuple[LeftAlone, ...]
    attention: tuple[str, ...]
    grafted: GraftReport

    @property
    def left_alone(self) -> tuple[LeftAlone, ...]:
        """The modules that stayed, without those that are ours."""
        # The parts of our attention layers have such a path.
        inside = f".{CHILD}."
        rows = list(self.kept)
        for row in self.grafted.left_alone:
            if row.reason != _OURS and inside not in row.path:
                rows.append(row)
        return tuple(rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, ready for ``json.dumps``."""
        return {
            "layers": [asdict(row) for row in self.layers],
            "attention": list(self.attention),
            "left_alone": [asdict(row) for row in self.left_alone],
            "grafted": self.grafted.to_dict(),
        }

    def __str__(self) -> str:
        # A model has dozens of equal layers, so rows are counted instead of listed.
        layers = _counted((row.source, row.layer) for row in self.layers)
        ops = _counted((row.source, row.op) for row in self.grafted.replaced)
        stayed = _counted((row.source, row.reason) for row in self.left_alone)
        lines = [f"{len(self.attention)} modules call our attention layers", ""]
        lines += table([("count", "module", "became"), *layers, *ops], WIDTH)
        if stayed:
            lines.append("")
            lines += table([("count", "left alone", "reason"), *stayed], WIDTH)
        return "\n".join(lines)


def _counted(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str, str]]:
    """Return count, first and second of each different pair, the most frequent pair first."""
    counts = Counter(pairs).most_common()
    return [(str(count), first, second) for (first, second), count in counts]
