"""Writes in a graph: the nodes whose memory another one writes to after they are made."""

from __future__ import annotations

import operator
from collections.abc import Iterator

from opgraft.compat.graphs import arguments_of
from torch import fx

_WRITTEN = "opgraft_written"
"""The key in ``meta`` of a node whose memory is written to afterwards."""


def mark_written(graph: fx.Graph) -> None:
    """Mark the nodes of a graph to whose memory another one writes after them, also by a view of it."""
    last: dict[fx.Node, int] = {}  # by who made a memory, the place of the last write to it
    memory: dict[fx.Node, fx.Node] = {}
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        shared = [*_shared(node)]
        memory[node] = memory[shared[0][0]] if shared else node
        last.update((memory[each], order[node]) for each, writes in shared if writes)
    for node, whose in memory.items():
        if order[node] < last.get(whose, -1):
            node.meta[_WRITTEN] = True


def is_written(node: fx.Node) -> bool:
    """Tell whether somebody writes to the memory of a node after it is made."""
    return _WRITTEN in node.meta


def _shared(node: fx.Node) -> Iterator[tuple[fx.Node, bool]]:
    """Yield the arguments whose memory a node writes to or returns, and whether it writes."""
    if node.target is operator.getitem:
        yield node.args[0], False  # type: ignore[misc]  # a node
        return
    for value, alias in arguments_of(node):
        if alias is not None:
            for each in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(each, fx.Node):
                    yield each, bool(alias.is_write)
