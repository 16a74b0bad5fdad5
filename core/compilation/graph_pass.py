"""A pass over the graph of a model, and the record of what it did."""

from __future__ import annotations

import hashlib
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import fx, nn

PASSED_OVER, LATER = "a provider's kernel is not passed over", "an argument is computed later"
"""Reasons that several passes have to leave a place."""


ALL_SIZES = range(1, sys.maxsize)
"""The sizes of the batch that a graph serves which is captured for any."""


class PassOutcome(NamedTuple):
    """The places in a graph that a pass looked for and found, those of them that it changed, and why it left others."""

    matched: int
    replaced: int
    left: tuple[str, ...] = ()

    @classmethod
    def of(cls, replaced: int, left: Sequence[str]) -> PassOutcome:
        """Count places that were changed, and those that were left, of each of which the reason is given."""
        return cls(replaced + len(left), replaced, tuple(dict.fromkeys(left)))


@dataclass(frozen=True)
class PassReport:
    """The record of one pass.

    Attributes:
        name: of the pass.
        source_hash: of its class's source, which changes with it.
        matched: places that it found.
        replaced: places that it changed.
        nodes: of the graph before and after.
        left: the reasons why it did not change the others, as far as the pass gives them.
    """

    name: str
    source_hash: str
    matched: int
    replaced: int
    nodes: tuple[int, int]
    left: tuple[str, ...] = ()

    def __str__(self) -> str:
        why = f" ({'; '.join(self.left)})" if self.left else ""
        return (
            f"{self.name} ({self.source_hash}): {self.matched} matched, {self.replaced} replaced{why}, "
            f"{self.nodes[0]} nodes to {self.nodes[1]}"
        )


class GraphPass(ABC):
    """A change of a graph that leaves what it computes, but for rounding.

    A subclass has a ``name`` and ``run``. It is constructed without arguments.
    """

    name: ClassVar[str]
    is_default: ClassVar[bool] = True
    """A pass of opgraft that is not runs only where ``compilation_config.pass_config`` says so."""

    @abstractmethod
    def run(self, module: fx.GraphModule, model: nn.Module) -> PassOutcome:
        """Change the graph in place, and count what was found and changed.

        Nodes that it adds need no ``meta``. What nobody uses any more is removed afterwards.

        Args:
            module: the graph over the tensors of the model, with semantic nodes.
            model: which it was captured from, not to be changed.
        """

    def applies(self, sizes: range) -> bool:
        """Tell whether the pass is for graphs of these sizes of the batch; all, unless a subclass says otherwise."""
        return True

    def source_hash(self) -> str:
        """Digest the module of the class, so that what depends on a pass can tell when it has changed."""
        module: Any = inspect.getmodule(type(self))
        return hashlib.sha256(inspect.getsource(module or type(self)).encode()).hexdigest()[:12]
