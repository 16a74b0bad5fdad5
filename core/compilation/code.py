"""Code: what a captured graph has become, or what an entry of the cache holds of that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from opgraft.compilation.backends import Runner
from opgraft.compilation.graph_pass import PassReport
from opgraft.compilation.lowering import Lowering
from opgraft.compilation.nodes import Origin
from opgraft.registry.decision import Decision
from torch import Tensor, fx, nn

if TYPE_CHECKING:
    from opgraft.compilation.execution import Execution  # which code from the cache does without


class Packaged(NamedTuple):
    """Code that is in a package of the cache.

    Attributes:
        key: of the package.
        origins: of the tensors of the graph.
        values: those of them that no model has.
    """

    key: str
    origins: Mapping[str, Origin]
    values: Mapping[str, Tensor]


class Code(NamedTuple):
    """A graph, and the function that runs it.

    Attributes:
        graph: what was captured, after all passes, with semantic nodes; ``None`` of code that was in the cache.
        passes: the record of each, in order.
        lowerings: for each form what its nodes have become.
        run: called with the tensors of the placeholders.
        tensors: of the model, with which it computes.
        joint: parameters over whose memory the graph has joint tensors.
        packaged: what is known of the package that it was written to; of one function, and only where it has one.
        execution: the pieces and static graphs that ``run`` consists of; ``None`` where it is one function.
        unkept: why some of it is in no package, where packages were asked for.
    """

    graph: fx.GraphModule | None
    passes: tuple[PassReport, ...]
    lowerings: tuple[Lowering, ...]
    run: Runner
    tensors: tuple[Tensor, ...]
    joint: tuple[nn.Parameter, ...]
    packaged: Packaged | None = None
    execution: Execution | None = None
    unkept: str = ""

    @property
    def recorded(self) -> tuple[int, ...]:
        """The sizes of the batch that have static graphs, and one that is padded."""
        sizes = self.execution.recorded if self.execution else ()
        padded = next((size - 1 for size in sizes if size - 1 not in (0, *sizes)), None)
        return sizes if padded is None else (*sizes, padded)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Tell for each form what its nodes have become, and how the graph runs."""
        lowerings = (each.decision for each in self.lowerings)
        return (*lowerings, *((self.execution.decision,) if self.execution else ()))
