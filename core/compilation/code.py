"""``Code``: a captured graph with the function that runs the graph, or the same from the cache."""

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
    # Code from the cache does without this module.
    from opgraft.compilation.execution import Execution


class PackagedCode(NamedTuple):
    """Code in a package of the cache.

    Attributes:
        key: the key of the package.
        origins: by name, the places of the graph's tensors in a model.
        values: by name, the tensors without a place in a model.
    """

    key: str
    origins: Mapping[str, Origin]
    values: Mapping[str, Tensor]


class Code(NamedTuple):
    """A graph, and the function that runs it.

    Attributes:
        graph: the captured graph after all passes, with semantic nodes; ``None`` if the code comes
            from the cache.
        passes: the record of each pass, in order.
        lowerings: for each form, the kernel in the place of its nodes.
        run: takes the tensors of the placeholders.
        tensors: the tensors of the model in the graph.
        joint: parameters in memory that the graph uses as one joint tensor.
        packaged: the package of the code; ``None`` without one, and if the code has several parts.
        execution: the pieces and static graphs of ``run``; ``None`` if ``run`` is one function.
        unkept: why a part of the code is in no package; empty if packages hold all.
    """

    graph: fx.GraphModule | None
    passes: tuple[PassReport, ...]
    lowerings: tuple[Lowering, ...]
    run: Runner
    tensors: tuple[Tensor, ...]
    joint: tuple[nn.Parameter, ...]
    packaged: PackagedCode | None = None
    execution: Execution | None = None
    unkept: str = ""

    @property
    def recorded(self) -> tuple[int, ...]:
        """The sizes of the batch with static graphs, and one size that needs padding."""
        sizes = self.execution.recorded if self.execution else ()
        for size in sizes:
            padded = size - 1
            if padded and padded not in sizes:
                return (*sizes, padded)
        return sizes

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The record of each form's kernel, then the record of how the graph runs."""
        lowerings = [each.decision for each in self.lowerings]
        if self.execution:
            lowerings.append(self.execution.decision)
        return tuple(lowerings)
