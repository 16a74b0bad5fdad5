"""Writes in a graph: mark each node with a later write to its memory."""

from __future__ import annotations

import operator
from collections.abc import Iterator

from opgraft.compat.graphs import arguments_of
from torch import fx

_WRITTEN = "opgraft_written"
"""The key in ``meta`` of a node with a later write to its memory."""


def mark_written(graph: fx.Graph) -> None:
    """Mark the nodes with a later write to their memory, by another node or through a view."""
    # By the node that makes a memory, the place of the last write.
    last_write: dict[fx.Node, int] = {}
    # By node, the node that makes the memory.
    memory: dict[fx.Node, fx.Node] = {}
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        shared = list(_arguments_sharing_memory(node))
        memory[node] = memory[shared[0][0]] if shared else node
        for argument, writes in shared:
            if writes:
                last_write[memory[argument]] = order[node]
    for node, maker in memory.items():
        if order[node] < last_write.get(maker, -1):
            node.meta[_WRITTEN] = True


def is_written(node: fx.Node) -> bool:
    """Return True if a later node writes to the memory of this node."""
    return _WRITTEN in node.meta


def _arguments_sharing_memory(node: fx.Node) -> Iterator[tuple[fx.Node, bool]]:
    """Yield the arguments that share memory with a node, each with True if the node writes."""
    if node.target is operator.getitem:
        yield node.args[0], False  # type: ignore[misc]  # a node
        return
    for value, alias in arguments_of(node):
        if alias is None:
            continue
        several = value if isinstance(value, (tuple, list)) else (value,)
        for each in several:
            if isinstance(each, fx.Node):
                yield each, bool(alias.is_write)
