"""The pass that joins the norms of query and key heads with the rotary embedding."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from opgraft.compilation.graph_pass import LATER, PASSED_OVER, GraphPass, PassOutcome
from opgraft.compilation.nodes import (
    OPERATOR,
    layout_of,
    may_replace,
    semantic_call,
    semantic_calls,
)
from torch import Tensor, fx, nn

_aten = torch.ops.aten
_opgraft = torch.ops.opgraft

_JOINED = "qk_norm_rope"
_NORMS = ("rms_norm", "gemma_rms_norm")
_REGROUPING = frozenset(("view", "reshape", "flatten"))
_ELEMENTWISE = frozenset(("cos", "sin", "to", "mul"))
"""Operators that keep equal halves equal, if the other arguments are numbers."""


@dataclass(frozen=True)
class _Norm:
    """A norm of heads ``x``, ``[..., head_size]``. Only a rotation reads the result."""

    name: str
    x: fx.Node
    weight: fx.Node
    eps: float

    def is_like(self, other: _Norm) -> bool:
        """Return True if one form can compute both. Literals are compared."""
        if self.name != other.name or self.eps != other.eps:
            return False
        return _sizes(self.x)[-1] == _sizes(other.x)[-1]


@dataclass(frozen=True)
class _RotatedHeads:
    """Heads after a norm and a rotation by rows of a table, a row for each token.

    Attributes:
        node: the rotated heads.
        norm: the norm of the heads.
        normed_by_heads: the norm sees ``[..., heads, tokens, head_size]``, and not
            ``[..., tokens, heads, head_size]``.
        by_heads: the rotation sees heads before tokens.
        cos: the cosines of all pairs for each token. With ``by_heads``, each cosine stands twice,
            and the batch is a dimension.
        sin: the sines, with the same shape.
        is_neox_style: pairs are elements of the two halves, not neighbours.
    """

    node: fx.Node
    norm: _Norm
    normed_by_heads: bool
    by_heads: bool
    cos: fx.Node
    sin: fx.Node
    is_neox_style: bool

    @property
    def kind(self) -> tuple[Any, ...]:
        """The rotation, and the sizes that query and key must have in common."""
        sizes = _sizes(self.norm.x)
        lead = (*sizes[:-3], sizes[-2]) if self.normed_by_heads else sizes[:-2]
        return self.cos, self.sin, self.is_neox_style, self.by_heads, lead


class QKNormRope(GraphPass):
    """Joins the norms of query and key heads with the rotation, by positions or by table rows."""

    name: ClassVar[str] = "qk_norm_rope"

    def run(self, module: fx.GraphModule, model: nn.Module) -> PassOutcome:
        first = _join_by_position(module.graph)
        second = _join_by_row(module.graph)
        matched = first.matched + second.matched
        replaced = first.replaced + second.replaced
        left = tuple(dict.fromkeys(first.left + second.left))
        return PassOutcome(matched, replaced, left)


def _join_by_position(graph: fx.Graph) -> PassOutcome:
    """Join rotations by positions, as in the decoders of opgraft."""
    replaced = 0
    left: list[str] = []
    for node, name, given in semantic_calls(graph, "rotary_embedding"):
        heads = [given.pop("query"), given.pop("key")]
        norms = _norms_of(heads, given["head_size"])
        if not norms:
            continue
        if not may_replace(_JOINED, name, norms[0].name):
            left.append(PASSED_OVER)
            continue
        with graph.inserting_before(node):
            parts = _joined(graph, norms, [norm.x for norm in norms], given)
            parts = [
                _side_by_side(graph, part, each, norm)
                for part, each, norm in zip(parts, heads, norms, strict=True)
            ]
        for user in list(node.users):
            place: Any = user.args[1]
            user.replace_all_uses_with(parts[place])
        replaced += 1
    return PassOutcome.of(replaced, left)


def _norms_of(heads: Sequence[fx.Node], head_size: Any) -> list[_Norm]:
    """Return the norms of query and key heads, if one form can compute both; otherwise none."""
    norms = []
    for each in heads:
        found = _norm_of(_apart(each))
        if found is None:
            return []
        norm, is_swapped = found
        if is_swapped:
            return []
        norms.append(norm)
    query, key = norms
    if not query.is_like(key) or _sizes(query.x)[-1] != str(head_size):
        return []
    return norms


def _side_by_side(graph: fx.Graph, part: fx.Node, former: fx.Node, norm: _Norm) -> fx.Node:
    """Return rotated heads with the sizes of the former ones: separate, or side by side."""
    if len(_sizes(former)) >= len(_sizes(norm.x)):
        return part
    return graph.call_function(_aten.flatten.using_ints, (part, -2))


def _join_by_row(graph: fx.Graph) -> PassOutcome:
    """Join rotations by a table row for each token, as in transformers: an op or operators."""
    replaced = 0
    left: list[str] = []
    order = {node: place for place, node in enumerate(graph.nodes)}
    tables: dict[Any, tuple[fx.Node, fx.Node]] = {}
    found = [each for each in map(_rotated, graph.nodes) if each is not None]
    query: _RotatedHeads | None = None
    for key in found:
        # Query and key come one after the other. Heads without a partner stay.
        if query is None or key.kind != query.kind or not query.norm.is_like(key.norm):
            query = key
            continue
        if max(order[key.norm.x], order[key.norm.weight]) > order[query.node]:
            left.append(LATER)
        elif not may_replace(_JOINED, "apply_rotary_emb", key.norm.name):
            left.append(PASSED_OVER)
        else:
            _replace(graph, query, key, tables)
            replaced += 1
        query = None
    return PassOutcome.of(replaced, left)


def _replace(
    graph: fx.Graph,
    query: _RotatedHeads,
    key: _RotatedHeads,
    tables: dict[Any, tuple[fx.Node, fx.Node]],
) -> None:
    """Put the form in the place of two norms and two rotations.

    Args:
        graph: the graph.
        query: the heads of the query.
        key: the heads of the key.
        tables: the tables in the graph by now, for one table per kind of rotation.
    """
    with graph.inserting_before(query.node):
        heads = []
        for each in (query, key):
            x = each.norm.x
            heads.append(_swapped(graph, x) if each.normed_by_heads else x)
        if query.kind not in tables:
            tables[query.kind] = _table(graph, query)
        table, positions = tables[query.kind]
        given = {
            "positions": positions,
            "head_size": query.norm.x.meta["val"].shape[-1],
            "cos_sin_cache": table,
            "is_neox_style": query.is_neox_style,
        }
        parts = _joined(graph, (query.norm, key.norm), heads, given)
        for part, each in zip(parts, (query, key), strict=True):
            if each.by_heads:
                part = _laid_out(graph, _swapped(graph, part), each.node.meta["val"])
            each.node.replace_all_uses_with(part)


def _joined(
    graph: fx.Graph, norms: Sequence[_Norm], heads: Sequence[fx.Node], given: Mapping[str, Any]
) -> list[fx.Node]:
    """Call the form, and return the new query and key.

    Args:
        graph: the graph.
        norms: the norms of query and key.
        heads: query and key before the norms, ``[..., tokens, heads, head_size]``.
        given: the arguments of the rotation, by name.
    """
    query, key = norms
    arguments = (
        given["positions"],
        *heads,
        given["head_size"],
        given["cos_sin_cache"],
        query.weight,
        key.weight,
        query.eps,
    )
    settings = {
        "is_neox_style": given["is_neox_style"],
        "one_plus_weight": query.name == "gemma_rms_norm",
    }
    both = graph.call_function(_opgraft.qk_norm_rope.default, arguments, settings)
    return [graph.call_function(operator.getitem, (both, place)) for place in (0, 1)]


def _sizes(x: Any) -> tuple[str, ...]:
    """Return sizes as texts, since a comparison of symbols would fix their values."""
    return tuple(map(str, x.meta["val"].shape))


def _norm_of(x: Any, readers: int = 1) -> tuple[_Norm, bool] | None:
    """Find the norm behind ``x``, if no other node reads the result of the norm.

    Args:
        x: the heads before the rotation.
        readers: the number of nodes with ``x`` for an argument.

    Returns:
        The norm, and True if tokens and heads were swapped after it; ``None`` without a norm.
    """
    swapped = False
    while isinstance(x, fx.Node) and len(x.users) == readers:
        called = semantic_call(x, *_NORMS)
        if called is not None:
            name, given = called
            if given["weight"] is None or given.get("variance_size") is not None:
                return None
            return _Norm(name, given["x"], given["weight"], given["eps"]), swapped
        x = _swapped_source(x)
        readers = 1
        swapped = not swapped
    return None


def _calls(node: Any, *names: str) -> bool:
    """Return True if a node calls one of torch's operators with these names."""
    if not isinstance(node, fx.Node) or not isinstance(node.target, OPERATOR):
        return False
    name, _, _ = node.target.name().removeprefix("aten::").partition(".")
    return name in names


def _apart(x: Any) -> Any:
    """Return the separate heads that ``x`` holds side by side, or ``x`` itself."""
    if not _calls(x, *_REGROUPING) or len(x.users) != 1:
        return x
    source = x.args[0]
    return source if _sizes(source)[:-2] == _sizes(x)[:-1] else x


def _rotated(node: Any) -> _RotatedHeads | None:
    """Return the rotation of normed heads that ends at a node, or ``None``."""
    called = semantic_call(node, "apply_rotary_emb")
    if called is None:
        return _rotated_by_operators(node)
    _, given = called
    found = _norm_of(given["x"])
    if found is None:
        return None
    return _RotatedHeads(node, *found, False, given["cos"], given["sin"], given["is_neox_style"])


def _rotated_by_operators(node: Any) -> _RotatedHeads | None:
    """Find ``x · cos + cat(-second half of x, first half of x) · sin``, heads before tokens."""
    if node.target is not _aten.add.Tensor or node.kwargs:
        return None
    if not all(_calls(each, "mul") for each in node.args):
        return None
    (x, cos), (turned, sin) = (each.args for each in node.args)
    # Three nodes read the normed heads: the product with cos, and a slice for each half.
    found = _norm_of(x, 3)
    if found is None or not _turns(turned, x) or len(_sizes(x)) != 4:
        return None
    tables = []
    for each in (cos, sin):
        # Tables have no dimension of heads: ``[batch, tokens, head_size]``.
        if not _calls(each, "unsqueeze") or each.args[1:] != (1,):
            return None
        table = each.args[0]
        if not _repeats(table) or not _has_rows_of(table, x):
            return None
        tables.append(table)
    norm, is_swapped = found
    cos_rows, sin_rows = tables
    return _RotatedHeads(node, norm, not is_swapped, True, cos_rows, sin_rows, True)


def _has_rows_of(table: Any, x: Any) -> bool:
    """Return True if a table has a row for each token of ``x``, for each batch or for all."""
    batch, _, *others = _sizes(x)
    first, *rest = _sizes(table)
    return first in ("1", batch) and rest == others


def _turns(turned: Any, x: Any) -> bool:
    """Return True if a node is ``cat((-second half of x, first half of x), -1)``."""
    if not _calls(turned, "cat") or turned.args[1:] != (-1,):
        return False
    parts = turned.args[0]
    if len(parts) != 2 or not _calls(parts[0], "neg"):
        return False
    second, first = parts[0].args[0], parts[1]
    for each in (second, first):
        if not _calls(each, "slice") or each.args[:2] not in ((x, 3), (x, -1)):
            return False
    size = x.meta["val"].shape[-1]
    start, end = second.args[2:]
    # A slice up to the end has any larger number for its end.
    is_second = start == size // 2 and end >= size
    return bool(is_second and first.args[2:] == (0, size // 2))


def _repeats(x: Any) -> bool:
    """Return True if both halves of the last dimension hold equal values."""
    while _calls(x, *_ELEMENTWISE):
        # Another tensor may differ between the halves.
        if any(isinstance(each, fx.Node) for each in x.args[1:]):
            return False
        x = x.args[0]
    if not _calls(x, "cat") or x.args[1:] != (-1,):
        return False
    halves = x.args[0]
    return len(halves) == 2 and halves[0] is halves[1]


def _swapped_source(x: Any) -> Any:
    """Return the tensor before a swap of tokens and heads; ``None`` if ``x`` is no such swap."""
    if not _calls(x, "transpose"):
        return None
    rank = len(_sizes(x))
    dims = {dim % rank for dim in x.args[1:]}
    return x.args[0] if dims == {rank - 3, rank - 2} else None


def _swapped(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """Swap tokens and heads. The source of a swap is the swapped tensor again."""
    # A new node has no value before the pass ends.
    source = _swapped_source(x) if "val" in x.meta else None
    if source is not None:
        return source  # type: ignore[no-any-return]
    return graph.call_function(_aten.transpose.int, (x, -3, -2))


def _laid_out(graph: fx.Graph, x: fx.Node, wanted: Tensor) -> fx.Node:
    """Return the swapped heads, copied if the former heads had another layout in memory."""
    view = wanted.new_empty(wanted.transpose(1, 2).shape).transpose(1, 2)
    if layout_of(view) == layout_of(wanted):
        return x
    return graph.call_function(_aten.contiguous.default, (x,))


def _table(graph: fx.Graph, rotated: _RotatedHeads) -> tuple[fx.Node, fx.Node]:
    """Make a table with a row for each token.

    Returns:
        The table of cosines and sines, ``[rows, head_size]``, and the row's number for each token.
    """
    rank = len(_sizes(rotated.cos))
    rows = [_size(graph, rotated.cos, dim) for dim in range(rank - 1)]
    table = _cos_and_sin(graph, rotated)
    count = graph.call_function(_aten.sym_size.int, (table, 0))

    x = rotated.norm.x
    settings = {"device": x.meta["val"].device, "pin_memory": False}
    numbers = graph.call_function(_aten.arange.default, (count,), settings)

    rank = len(_sizes(x))
    tokens = rank - (2 if rotated.normed_by_heads else 3)
    lead = [_size(graph, x, dim) for dim in (*range(rank - 3), tokens)]
    # A batch of one in the table serves every batch of heads.
    by_rows = graph.call_function(_aten.view.default, (numbers, rows))
    positions = graph.call_function(_aten.expand.default, (by_rows, lead))
    return table, graph.call_function(_aten.contiguous.default, (positions,))


def _cos_and_sin(graph: fx.Graph, rotated: _RotatedHeads) -> fx.Node:
    """Put cosines and sines beside each other, ``[rows, head_size]``."""
    tables = [rotated.cos, rotated.sin]
    if not rotated.by_heads:
        return graph.call_function(_aten.cat.default, (tables, -1))
    half = rotated.norm.x.meta["val"].shape[-1] // 2
    # Each cosine stands twice in a row, so the first half has all.
    halves = [graph.call_function(_aten.slice.Tensor, (each, -1, 0, half)) for each in tables]
    table = graph.call_function(_aten.cat.default, (halves, -1))
    return graph.call_function(_aten.flatten.using_ints, (table, 0, 1))


def _size(graph: fx.Graph, x: fx.Node, dim: int) -> Any:
    """Return a size of a tensor: a number, or a node if the size is dynamic."""
    size = x.meta["val"].shape[dim]
    if isinstance(size, int):
        return size
    return graph.call_function(_aten.sym_size.int, (x, dim))
