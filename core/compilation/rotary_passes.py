"""The pass that joins the norms of query and key heads with the rotary embedding."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from opgraft.compilation.graph_pass import LATER, PASSED_OVER, GraphPass, PassOutcome
from opgraft.compilation.nodes import OPERATOR, has_kernel, layout_of, semantic_call, semantic_calls
from torch import Tensor, fx, nn

_aten = torch.ops.aten
_opgraft = torch.ops.opgraft

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
        return (self.name, self.eps, _sizes(self.x)[-1]) == (
            other.name,
            other.eps,
            _sizes(other.x)[-1],
        )


@dataclass(frozen=True)
class _Rotated:
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
        first, second = _join_by_position(module.graph), _join_by_row(module.graph)
        left = tuple(dict.fromkeys(first.left + second.left))
        return PassOutcome(first.matched + second.matched, first.replaced + second.replaced, left)


def _join_by_position(graph: fx.Graph) -> PassOutcome:
    """Join rotations by positions, as in the decoders of opgraft."""
    replaced, left = 0, list[str]()
    for node, name, given in semantic_calls(graph, "rotary_embedding"):
        heads = [given.pop("query"), given.pop("key")]
        found = [_norm_of(_apart(each)) for each in heads]
        norms = [each[0] for each in found if each is not None and not each[1]]
        if (
            len(norms) < 2
            or not norms[0].is_like(norms[1])
            or _sizes(norms[0].x)[-1] != str(given["head_size"])
        ):
            continue
        if not _is_free(name, norms[0]):
            left.append(PASSED_OVER)
            continue
        with graph.inserting_before(node):
            parts = _joined(graph, norms, [norm.x for norm in norms], given)
            for place, (each, norm) in enumerate(zip(heads, norms, strict=True)):
                if len(_sizes(each)) < len(_sizes(norm.x)):
                    parts[place] = graph.call_function(_aten.flatten.using_ints, (parts[place], -2))
        for user in list(node.users):
            user.replace_all_uses_with(parts[user.args[1]])  # type: ignore[index]
        replaced += 1
    return PassOutcome.of(replaced, left)


def _join_by_row(graph: fx.Graph) -> PassOutcome:
    """Join rotations by a table row for each token, as in transformers: an op or operators."""
    replaced, left = 0, list[str]()
    order = {node: place for place, node in enumerate(graph.nodes)}
    tables: dict[Any, tuple[fx.Node, fx.Node]] = {}
    query: _Rotated | None = None
    for key in [each for each in map(_rotated, graph.nodes) if each is not None]:
        if query is None or key.kind != query.kind or not query.norm.is_like(key.norm):
            query = key
            continue
        if max(order[each] for each in (key.norm.x, key.norm.weight)) > order[query.node]:
            left.append(LATER)
        elif not _is_free("apply_rotary_emb", key.norm):
            left.append(PASSED_OVER)
        else:
            _replace(graph, query, key, tables)
            replaced += 1
        query = None
    return PassOutcome.of(replaced, left)


def _replace(
    graph: fx.Graph, query: _Rotated, key: _Rotated, tables: dict[Any, tuple[fx.Node, fx.Node]]
) -> None:
    """Put the form in the place of two norms and two rotations.

    Args:
        graph: the graph.
        query: the heads of the query.
        key: the heads of the key.
        tables: the tables in the graph by now, for one table per kind of rotation.
    """
    with graph.inserting_before(query.node):
        heads = [
            _swapped(graph, each.norm.x) if each.normed_by_heads else each.norm.x
            for each in (query, key)
        ]
        if query.kind not in tables:
            tables[query.kind] = _table(graph, query)
        table, positions = tables[query.kind]
        size = query.norm.x.meta["val"].shape[-1]
        given = {
            "positions": positions,
            "head_size": size,
            "cos_sin_cache": table,
            "is_neox_style": query.is_neox_style,
        }
        parts = _joined(graph, (query.norm, key.norm), heads, given)
        for place, each in enumerate((query, key)):
            if each.by_heads:
                parts[place] = _laid_out(
                    graph, _swapped(graph, parts[place]), each.node.meta["val"]
                )
            each.node.replace_all_uses_with(parts[place])


def _joined(graph: fx.Graph, norms: Any, heads: Any, given: dict[str, Any]) -> list[fx.Node]:
    """Call the form, and return the new query and key."""
    query, key = norms
    weights = {"query_weight": query.weight, "key_weight": key.weight, "eps": query.eps}
    gemma = {"one_plus_weight": query.name == "gemma_rms_norm"}
    tensors = (given["positions"], *heads, given["head_size"], given["cos_sin_cache"])
    settings = {"is_neox_style": given["is_neox_style"], **gemma}
    both = graph.call_function(
        _opgraft.qk_norm_rope.default, (*tensors, *weights.values()), settings
    )
    return [graph.call_function(operator.getitem, (both, place)) for place in (0, 1)]


def _is_free(rotation: str, norm: _Norm) -> bool:
    """Return True if the join passes over no provider's kernel."""
    return has_kernel("qk_norm_rope") or not (has_kernel(rotation) or has_kernel(norm.name))


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
        x, readers, swapped = _swapped_source(x), 1, not swapped
    return None


def _calls(node: Any, *names: str) -> bool:
    """Return True if a node calls one of torch's operators with these names."""
    target = node.target if isinstance(node, fx.Node) else None
    return (
        isinstance(target, OPERATOR)
        and target.name().removeprefix("aten::").partition(".")[0] in names
    )


def _apart(x: Any) -> Any:
    """Return the separate heads that ``x`` holds side by side, or ``x`` itself."""
    source = x.args[0] if _calls(x, *_REGROUPING) and len(x.users) == 1 else x
    return source if _sizes(source)[:-2] == _sizes(x)[:-1] else x


def _rotated(node: Any) -> _Rotated | None:
    """Return the rotation of normed heads that ends at a node, or ``None``."""
    called = semantic_call(node, "apply_rotary_emb")
    if called is None:
        return _rotated_by_operators(node)
    given = called[1]
    found = _norm_of(given["x"])
    if found is None:
        return None
    return _Rotated(node, *found, False, given["cos"], given["sin"], given["is_neox_style"])


def _rotated_by_operators(node: Any) -> _Rotated | None:
    """Find ``x · cos + cat(-second half of x, first half of x) · sin``, heads before tokens."""
    if (
        node.target is not _aten.add.Tensor
        or node.kwargs
        or not all(_calls(each, "mul") for each in node.args)
    ):
        return None
    (x, cos), (turned, sin) = (each.args for each in node.args)
    found = _norm_of(x, 3)
    if found is None or not _turns(turned, x):
        return None
    rows = [
        each.args[0] for each in (cos, sin) if _calls(each, "unsqueeze") and each.args[1:] == (1,)
    ]
    batch, *others = (_sizes(x)[dim] for dim in (0, -2, -1))
    if len(_sizes(x)) != 4 or len(rows) != 2 or not all(map(_repeats, rows)):
        return None
    if any(_sizes(each)[0] not in ("1", batch) or [*_sizes(each)[1:]] != others for each in rows):
        return None
    return _Rotated(node, found[0], not found[1], True, rows[0], rows[1], True)


def _turns(turned: Any, x: Any) -> bool:
    """Return True if a node is ``cat((-second half of x, first half of x), -1)``."""
    parts: Any = turned.args[0] if _calls(turned, "cat") and turned.args[1:] == (-1,) else ()
    if len(parts) != 2 or not _calls(parts[0], "neg"):
        return False
    slices = [parts[0].args[0], parts[1]]
    if not all(_calls(each, "slice") and each.args[:2] in ((x, 3), (x, -1)) for each in slices):
        return False
    (start, end), first = (each.args[2:] for each in slices)
    size = x.meta["val"].shape[-1]
    return bool(start == size // 2 and end >= size and first == (0, size // 2))


def _repeats(x: Any) -> bool:
    """Return True if both halves of the last dimension hold equal values."""
    while _calls(x, *_ELEMENTWISE) and not any(isinstance(each, fx.Node) for each in x.args[1:]):
        x = x.args[0]
    return (
        _calls(x, "cat") and x.args[1:] == (-1,) and len({*x.args[0]}) == 1 and len(x.args[0]) == 2
    )


def _swapped_source(x: Any) -> Any:
    """Return the tensor before a swap of tokens and heads; ``None`` if ``x`` is no such swap."""
    rank = len(_sizes(x))
    dims = {dim % rank for dim in x.args[1:]} if _calls(x, "transpose") else ()
    return x.args[0] if dims == {rank - 3, rank - 2} else None


def _swapped(graph: fx.Graph, x: fx.Node) -> fx.Node:
    source = _swapped_source(x) if "val" in x.meta else None
    return graph.call_function(_aten.transpose.int, (x, -3, -2)) if source is None else source


def _laid_out(graph: fx.Graph, x: fx.Node, wanted: Tensor) -> fx.Node:
    """Return the swapped heads, copied if the former heads had another layout in memory."""
    view = wanted.new_empty(wanted.transpose(1, 2).shape).transpose(1, 2)
    return (
        x
        if layout_of(view) == layout_of(wanted)
        else graph.call_function(_aten.contiguous.default, (x,))
    )


def _table(graph: fx.Graph, rotated: _Rotated) -> tuple[fx.Node, fx.Node]:
    """Make a table with a row for each token. Return the table and the row's number per token."""

    def call(target: Any, *args: Any, **settings: Any) -> fx.Node:
        return graph.call_function(target, args, settings)

    def size(x: fx.Node, dim: int, known: Any) -> Any:
        return known if isinstance(known, int) else call(_aten.sym_size.int, x, dim)

    x, tables = rotated.norm.x, [rotated.cos, rotated.sin]
    given = x.meta["val"].shape
    rows = [
        size(tables[0], dim, known) for dim, known in enumerate(tables[0].meta["val"].shape[:-1])
    ]
    if rotated.by_heads:
        tables = [call(_aten.slice.Tensor, each, -1, 0, given[-1] // 2) for each in tables]
    table = call(_aten.cat.default, tables, -1)
    if rotated.by_heads:
        table = call(_aten.flatten.using_ints, table, 0, 1)
    count = call(_aten.sym_size.int, table, 0)
    numbers = call(_aten.arange.default, count, device=x.meta["val"].device, pin_memory=False)
    tokens = len(given) - (2 if rotated.normed_by_heads else 3)
    lead = [size(x, dim, given[dim]) for dim in (*range(len(given) - 3), tokens)]
    positions = call(_aten.expand.default, call(_aten.view.default, numbers, rows), lead)
    return table, call(_aten.contiguous.default, positions)
