"""``GraphPass``, a pass over the graph of a model, and the record of its changes."""

from __future__ import annotations

import hashlib
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import fx, nn

PASSED_OVER = "a provider's kernel is not passed over"
"""The reason to leave a provider's kernel, if no provider has a kernel for the new form."""

LATER = "an argument is computed later"
"""The reason to leave a place if the new form would run before one of the arguments is computed."""

ALL_SIZES = range(1, sys.maxsize)
"""The sizes of the batch for a graph that serves any size."""


class PassOutcome(NamedTuple):
    """The outcome of a pass.

    Attributes:
        matched: the number of places in the graph that the pass has looked for and found.
        replaced: the number of changed places.
        left: the reasons for places without a change.
    """

    matched: int
    replaced: int
    left: tuple[str, ...] = ()

    @classmethod
    def of(cls, replaced: int, left: Sequence[str]) -> PassOutcome:
        """Return the outcome for a number of changed places, with a reason for each other place."""
        return cls(replaced + len(left), replaced, tuple(dict.fromkeys(left)))


@dataclass(frozen=True)
class PassReport:
    """The record of one pass.

    Attributes:
        name: the name of the pass.
        source_hash: a digest of the pass's source.
        matched: the number of places that the pass found.
        replaced: the number of changed places.
        nodes: the number of nodes of the graph before and after.
        left: the reasons for places without a change, as far as the pass tells.
    """

    name: str
    source_hash: str
    matched: int
    replaced: int
    nodes: tuple[int, int]
    left: tuple[str, ...] = ()

    def __str__(self) -> str:
        why = f" ({'; '.join(self.left)})" if self.left else ""
        before, after = self.nodes
        return (
            f"{self.name} ({self.source_hash}): {self.matched} matched, {self.replaced} "
            f"replaced{why}, {before} nodes to {after}"
        )


class GraphPass(ABC):
    """A change of a graph with the same results, except for rounding.

    A subclass has a ``name`` and ``run``. Its constructor takes no arguments where settings name the
    class or give the class itself: the engine constructs the pass then.
    """

    name: ClassVar[str]
    is_default: ClassVar[bool] = True
    """The pass runs by default. Otherwise ``compilation_config.pass_config`` turns the pass on."""

    @abstractmethod
    def run(self, module: fx.GraphModule, model: nn.Module) -> PassOutcome:
        """Change the graph in place, and count the found and the changed places.

        New nodes need no ``meta``. Unused nodes are removed after the pass.

        Args:
            module: the graph over the tensors of the model, with semantic nodes.
            model: the model of the graph, not to be changed.
        """

    def applies(self, sizes: range) -> bool:
        """Return True if the pass runs over graphs for these sizes of the batch; by default all."""
        return True

    def source_hash(self) -> str:
        """Return a digest of the module of the class. It tells users of a pass about a change."""
        module: Any = inspect.getmodule(type(self))
        source = inspect.getsource(module or type(self))
        return hashlib.sha256(source.encode()).hexdigest()[:12]
