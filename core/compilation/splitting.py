"""Splitting: cut a graph at operators into pieces that exchange tensors.

Equal pieces, such as the layers of a decoder, have equal keys and are compiled once.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from opgraft.compilation.nodes import OPERATOR, attribute_of, layout_of
from opgraft.compilation.writes import mark_written
from opgraft.errors import ConfigError
from torch import Tensor, fx

HELD = "opgraft_held"
"""The key in ``meta`` of a piece's input: True for a tensor of the model, the same at each call."""


@dataclass(frozen=True)
class Piece:
    """A part of a graph as a graph of its own.

    Attributes:
        module: takes and returns tensors. Parameters are arguments, so equal pieces share code.
        inputs: the nodes of the arguments in the whole graph.
        outputs: the nodes of the results in the whole graph.
        cut: the operator of a cut; empty for a piece between cuts.
        key: equal for pieces with equal computations.
    """

    module: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    cut: str
    key: str


def split(module: fx.GraphModule, cuts: Collection[str]) -> list[Piece]:
    """Cut a graph at each call of some operators. L calls give up to 2 L + 1 pieces.

    Args:
        module: the graph, which stays as it is.
        cuts: operators as ``namespace::name``, with all overloads.

    Raises:
        ConfigError: there is no such operator.
    """
    expect_operators(cuts)
    groups: list[tuple[str, list[fx.Node]]] = [("", [])]
    home: dict[fx.Node, int] = {}
    for node in module.graph.nodes:
        if node.op != "call_function" or not _is_exchanged(node):
            continue
        # Pieces exchange no tuples, so the piece of the tuple takes the parts out.
        if node.target is operator.getitem:
            home[node] = home[node.args[0]]
        else:
            cut = _cut(node, cuts)
            last_cut, _ = groups[-1]
            # A cut is a piece of its own.
            if cut or last_cut:
                groups.append((cut, []))
            home[node] = len(groups) - 1
        _, members = groups[home[node]]
        members.append(node)
    sizes = _sizes(module)
    return [_piece(module, nodes, cut, sizes) for cut, nodes in groups if nodes]


def expect_operators(names: Collection[str]) -> None:
    """Check names of operators.

    Raises:
        ConfigError: no operator has the name. The message describes the form of names.
    """
    for name in names:
        namespace, _, short = name.partition("::")
        is_name = re.fullmatch(r"\w+::\w+", name) is not None
        if not is_name or not hasattr(getattr(torch.ops, namespace), short):
            raise ConfigError(
                f"compilation_config.splitting_ops has {name!r}, and torch knows no such operator: "
                "write it as namespace::name, such as aten::scaled_dot_product_attention, and see "
                "that what registers it is imported before"
            )


def _cut(node: fx.Node, names: Collection[str]) -> str:
    """Return the name of the operator if a node calls one to cut at; empty for other nodes."""
    if not isinstance(node.target, OPERATOR):
        return ""
    name = node.target.name().partition(".")[0]
    return name if name in names else ""


def _is_exchanged(node: fx.Node) -> bool:
    """Return True if a node returns tensors. Each piece computes sizes for itself."""
    value = node.meta.get("val")
    several = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(each, Tensor) for each in several)


def _sizes(module: fx.GraphModule) -> dict[str, fx.Node]:
    """Return an input of the graph with each dynamic size as a dimension, by name of the size."""
    found: dict[str, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op != "placeholder":
            continue
        for size in node.meta["val"].shape:
            if not isinstance(size, int):
                found.setdefault(str(size), node)
    return found


def _piece(
    module: fx.GraphModule, nodes: Sequence[fx.Node], cut: str, sizes: Mapping[str, fx.Node]
) -> Piece:
    """Make a piece of some nodes of a graph.

    Args:
        module: the whole graph.
        nodes: the nodes of the piece.
        cut: the operator of a cut, or empty.
        sizes: the result of ``_sizes``.
    """
    given = _nodes_from_outside(module, nodes, sizes)
    copies = _Copies(sizes)
    for node in given:
        copies.add_input(node, _value_of_node(module, node))
    for node in nodes:
        copies.copy(node)
    outputs = _outputs(nodes)
    graph = copies.graph
    graph.output(tuple(copies.copy(node) for node in outputs))
    mark_written(graph)
    part = fx.GraphModule(module, graph)
    key = "\n".join(_lines(module, graph))
    return Piece(part, tuple(given), outputs, cut, key)


class _Copies:
    """The copies of nodes in the graph of a piece.

    Args:
        sizes: the result of ``_sizes``.

    Attributes:
        graph: the graph of the piece.
    """

    def __init__(self, sizes: Container[str]) -> None:
        self.graph = fx.Graph()
        self._sizes = sizes
        self._by_node: dict[fx.Node, fx.Node] = {}
        self._by_size: dict[str, fx.Node] = {}

    def add_input(self, node: fx.Node, value: Any) -> None:
        """Add an input for a node outside of the piece."""
        made = self.graph.placeholder(f"given_{len(self._by_node)}")
        made.meta = {"val": value, HELD: node.op == "get_attr"}
        self._by_node[node] = made

    def copy(self, node: fx.Node) -> fx.Node:
        """Return the copy of a node. Copies of all arguments come before."""
        size = _size_of(node, self._sizes)
        if size:
            return self._size(size, node.meta["val"])
        if node not in self._by_node:
            self._by_node[node] = self.graph.node_copy(node, self.copy)
        return self._by_node[node]

    def _size(self, name: str, value: Any) -> fx.Node:
        """Return the node of a dynamic size."""
        if name not in self._by_size:
            # By any tensor in the piece with this size: equal pieces have equal texts then.
            tensors = {each: each.meta["val"] for each in self._by_node.values()}
            place, dim = next(_dimensions(name, tensors))
            made = self.graph.call_function(torch.ops.aten.sym_size.int, (place, dim))
            made.meta = {"val": value}
            self._by_size[name] = made
        return self._by_size[name]


def _outputs(nodes: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    """Return the tensors of a piece with a reader outside of the piece."""
    inside = {*nodes}
    found = []
    for node in nodes:
        is_read_outside = any(user not in inside for user in node.users)
        if is_read_outside and isinstance(node.meta["val"], Tensor):
            found.append(node)
    return tuple(found)


def _nodes_from_outside(
    module: fx.GraphModule, nodes: Sequence[fx.Node], sizes: Mapping[str, fx.Node]
) -> list[fx.Node]:
    """Return the nodes outside of a piece that the piece reads.

    Last come inputs of the graph for sizes without a dimension among the other nodes.
    """
    inside = {*nodes}
    given: dict[fx.Node, Tensor] = {}
    named: set[str] = set()

    def gather(node: fx.Node) -> None:
        name = _size_of(node, sizes)
        if name:
            named.add(name)
            return
        if node in inside:
            return
        if _is_given(module, node):
            given[node] = _value_of_node(module, node)
            return
        # The piece computes such a node itself: a size, or a branch of torch.cond.
        for each in node.all_input_nodes:
            gather(each)

    for node in nodes:
        for each in node.all_input_nodes:
            gather(each)
    # A size may stand in a term, such as "2*batch" or "batch//2".
    for value in given.values():
        for size in value.shape:
            named.update(re.findall(r"\w+", str(size)))
    missing = []
    for name, node in sizes.items():
        if name in named and not any(_dimensions(name, given)):
            missing.append(node)
    return [*given, *missing]


def _size_of(node: fx.Node, sizes: Container[str]) -> str:
    """Return the name of the input's size in the place of a node; empty for other nodes."""
    value = node.meta.get("val")
    return str(value) if isinstance(value, torch.SymInt) and str(value) in sizes else ""


def _dimensions(name: str, tensors: Mapping[fx.Node, Any]) -> Iterator[tuple[fx.Node, int]]:
    """Yield the nodes and dimensions of tensors with a size."""
    for node, value in tensors.items():
        shape = value.shape if isinstance(value, Tensor) else ()
        for dim, size in enumerate(shape):
            if str(size) == name:
                yield node, dim


def _is_given(module: fx.GraphModule, node: fx.Node) -> bool:
    """Return True if the value of a node is an argument of a piece."""
    # The branches of torch.cond are attributes, too.
    if node.op == "get_attr":
        return isinstance(attribute_of(module, node), Tensor)
    return node.op == "placeholder" or _is_exchanged(node)


def _value_of_node(module: fx.GraphModule, node: fx.Node) -> Any:
    return node.meta["val"] if "val" in node.meta else attribute_of(module, node)


def _lines(module: fx.GraphModule, graph: fx.Graph) -> Iterator[str]:
    """Yield a text for each node. Equal graphs have equal texts, with any names of nodes."""
    numbers = {node: f"%{number}" for number, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        what = f"{node.target}" if node.op == "call_function" else node.op
        if node.op == "get_attr":
            what += f" {id(attribute_of(module, node))}"
        arguments = fx.node.map_arg((node.args, node.kwargs), numbers.__getitem__)
        yield f"{what} {arguments} {layout_of(node.meta.get('val'))}"
