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
            groups[home[node]][1].append(node)
            continue
        cut = _cut(node, cuts)
        if cut or groups[-1][0]:
            groups.append((cut, []))
        groups[-1][1].append(node)
        home[node] = len(groups) - 1
    sizes = _sizes(module)
    return [_piece(module, nodes, cut, sizes) for cut, nodes in groups if nodes]


def expect_operators(names: Collection[str]) -> None:
    """Check names of operators.

    Raises:
        ConfigError: no operator has the name. The message describes the form of names.
    """
    for name in names:
        namespace, _, short = name.partition("::")
        if not (re.fullmatch(r"\w+::\w+", name) and hasattr(getattr(torch.ops, namespace), short)):
            raise ConfigError(
                f"compilation_config.splitting_ops has {name!r}, and torch knows no such operator: "
                "write it as namespace::name, such as aten::scaled_dot_product_attention, and see "
                "that what registers it is imported before"
            )


def _cut(node: fx.Node, names: Collection[str]) -> str:
    name = node.target.name().partition(".")[0] if isinstance(node.target, OPERATOR) else ""
    return name if name in names else ""


def _is_exchanged(node: fx.Node) -> bool:
    """Return True if a node returns tensors. Each piece computes sizes for itself."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) or (
        isinstance(value, (tuple, list)) and any(isinstance(x, Tensor) for x in value)
    )


def _sizes(module: fx.GraphModule) -> dict[str, fx.Node]:
    """Return an input of the graph with each dynamic size as a dimension, by name of the size."""
    found: dict[str, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
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
    given = _given(module, nodes, sizes)
    graph = fx.Graph()
    known: dict[fx.Node | str, fx.Node] = {}
    for node in given:
        made = known[node] = graph.placeholder(f"given_{len(known)}")
        made.meta = {"val": _value(module, node), HELD: node.op == "get_attr"}

    def copied(node: fx.Node) -> fx.Node:
        name = _size_of(node, sizes)
        # By any input of the piece with this size: equal pieces have equal texts then.
        if name and name not in known:
            place, dim = next(
                _dimensions(name, {each: each.meta["val"] for each in known.values()})
            )
            known[name] = graph.call_function(torch.ops.aten.sym_size.int, (place, dim))
            known[name].meta = {"val": node.meta["val"]}
        elif not name and node not in known:
            known[node] = graph.node_copy(node, copied)
        return known[name or node]

    for node in nodes:
        copied(node)
    inside = {*nodes}
    outputs = tuple(
        n
        for n in nodes
        if isinstance(n.meta["val"], Tensor) and any(u not in inside for u in n.users)
    )
    graph.output(tuple(known[node] for node in outputs))
    mark_written(graph)
    return Piece(
        fx.GraphModule(module, graph), tuple(given), outputs, cut, "\n".join(_lines(module, graph))
    )


def _given(
    module: fx.GraphModule, nodes: Sequence[fx.Node], sizes: Mapping[str, fx.Node]
) -> list[fx.Node]:
    """Return the nodes outside of a piece that the piece reads.

    Last come inputs of the graph for sizes without a dimension among the other nodes.
    """
    inside, given, named = {*nodes}, dict[fx.Node, Tensor](), set[str]()

    def gather(node: fx.Node) -> None:
        name = _size_of(node, sizes)
        if name:
            named.add(name)
        elif node not in inside and _is_given(module, node):
            given[node] = _value(module, node)
        elif node not in inside:
            for each in node.all_input_nodes:
                gather(each)

    for node in nodes:
        for each in node.all_input_nodes:
            gather(each)
    words = {
        word
        for value in given.values()
        for size in value.shape
        for word in re.findall(r"\w+", str(size))
    }
    missing = [
        node
        for name, node in sizes.items()
        if name in words | named and not any(_dimensions(name, given))
    ]
    return [*given, *missing]


def _size_of(node: fx.Node, sizes: Container[str]) -> str:
    """Return the name of the input's size in the place of a node; empty for other nodes."""
    value = node.meta.get("val")
    return str(value) if isinstance(value, torch.SymInt) and str(value) in sizes else ""


def _dimensions(name: str, tensors: Mapping[fx.Node, Any]) -> Iterator[tuple[fx.Node, int]]:
    """Yield the nodes and dimensions of tensors with a size."""
    for node, value in tensors.items():
        for dim, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
            if str(size) == name:
                yield node, dim


def _is_given(module: fx.GraphModule, node: fx.Node) -> bool:
    """Return True if the value of a node is an argument of a piece."""
    # The branches of torch.cond are attributes, too.
    if node.op == "get_attr":
        return isinstance(attribute_of(module, node), Tensor)
    return node.op == "placeholder" or _is_exchanged(node)


def _value(module: fx.GraphModule, node: fx.Node) -> Any:
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
