"""Passes over the collectives of a model with shared layers: sums, norms and maps around them."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from opgraft.binding.functional import Functional
from opgraft.compilation.graph_pass import LATER, PASSED_OVER, GraphPass, PassOutcome
from opgraft.compilation.nodes import may_replace, semantic_call, semantic_calls
from opgraft.distributed import get_tp_group
from opgraft.ops.fused.collectives import functional
from torch import fx, nn

_aten = torch.ops.aten
_opgraft = torch.ops.opgraft

_AFTER_SUM = "fused_add_"
"""The beginning of the names of forms that add a residual first, and return the sum last."""

_FUSED: dict[str, Functional[..., Any]] = {
    "rms_norm": functional.all_reduce_rms_norm,
    "gemma_rms_norm": functional.all_reduce_gemma_rms_norm,
    "rms_norm_quant_fp8_static": functional.all_reduce_rms_norm_quant_fp8_static,
    "rms_norm_quant_fp8_dynamic": functional.all_reduce_rms_norm_quant_fp8_dynamic,
    "rms_norm_quant_fp4": functional.all_reduce_rms_norm_quant_fp4,
}
"""By form of a norm, with or without quantisation: the form with a sum over ranks before."""

_NORMS = (*_FUSED, *(f"{_AFTER_SUM}{name}" for name in _FUSED))


def _is_all_reduce(node: object) -> bool:
    return isinstance(node, fx.Node) and node.target is _opgraft.all_reduce.default


class AllReduceRMSNorm(GraphPass):
    """Joins a sum over ranks, the sum of a residual stream, and the norm, into one form.

    The norm may be quantised.
    """

    name: ClassVar[str] = "all_reduce_rms_norm"

    def run(self, module: fx.GraphModule, model: nn.Module) -> PassOutcome:
        graph = module.graph
        replaced = 0
        left: list[str] = []
        order = {node: place for place, node in enumerate(graph.nodes)}
        for node, name, given in semantic_calls(graph, *_NORMS):
            found = _sum_and_norm(node, name, given, order)
            if found is None:
                continue
            reason = _reason_to_leave(found, order)
            if reason:
                left.append(reason)
                continue
            parts = _join_sum_and_norm(graph, found)
            # The new nodes stand at the place of the sum.
            order.update(dict.fromkeys(parts, order[found.reduced]))
            replaced += 1
        return PassOutcome.of(replaced, left)


@dataclass(frozen=True)
class _SumAndNorm:
    """A norm with a sum over ranks before.

    Attributes:
        norm: the norm. It returns the sum with a residual, too, if ``adds_residual``.
        name: the name of the norm's form.
        reduced: the sum over ranks.
        adds_residual: the norm adds a residual first.
        others: the summand besides ``reduced``; empty without one.
        settings: the other arguments of the norm.
    """

    norm: fx.Node
    name: str
    reduced: fx.Node
    adds_residual: bool
    others: tuple[Any, ...]
    settings: Mapping[str, Any]

    @property
    def fused(self) -> str:
        """The name of the form in the place of both."""
        return _FUSED[self.name.removeprefix(_AFTER_SUM)].name


def _sum_and_norm(
    norm: fx.Node, name: str, given: dict[str, Any], order: Mapping[fx.Node, int]
) -> _SumAndNorm | None:
    """Find the sum over ranks before a norm.

    Args:
        norm: the norm.
        name: the name of the norm's form.
        given: the arguments of the norm.
        order: the place of each node in the graph.

    Returns:
        The norm with the sum; ``None`` without a sum, or for a norm over a part of each row.
    """
    settings = dict(given)
    summands = [settings.pop(each) for each in ("x", "residual") if each in settings]
    sums = [each for each in summands if _is_all_reduce(each)]
    if not sums or settings.pop("variance_size", None) is not None:
        return None
    # With two sums, the form takes the place of the later one, and reads the other.
    reduced = max(sums, key=order.__getitem__)
    others = tuple(each for each in summands if each is not reduced)
    return _SumAndNorm(norm, name, reduced, len(summands) > 1, others, settings)


def _reason_to_leave(found: _SumAndNorm, order: Mapping[fx.Node, int]) -> str:
    """Return the reason against one form for a sum and a norm; empty without one."""
    if found.adds_residual and (not found.others or len(found.reduced.users) > 1):
        return "the sum over ranks alone is read, too"
    for each in (*found.others, *found.settings.values()):
        if isinstance(each, fx.Node) and order[each] > order[found.reduced]:
            return LATER
    if not may_replace(found.fused, found.name):
        return PASSED_OVER
    return ""


def _join_sum_and_norm(graph: fx.Graph, found: _SumAndNorm) -> list[fx.Node]:
    """Put one form in the place of a sum over ranks and a norm.

    Returns:
        The results of the form: the normed tensor, scales if the norm quantises with scales of its
        own, and the sum.
    """
    x, kind = found.reduced.args
    residual = found.others[0] if found.others else None
    arguments = {"x": x, "residual": residual, **found.settings, "kind": kind}
    returns_scales = _returns_scales(found.fused)
    with graph.inserting_before(found.reduced):
        form = getattr(_opgraft, found.fused).default
        fused = graph.call_function(form, (), arguments)
        parts = []
        for place in range(3 if returns_scales else 2):
            parts.append(graph.call_function(operator.getitem, (fused, place)))
    if found.adds_residual or returns_scales:
        # The readers of a norm with several results take one of them each.
        for user in list(found.norm.users):
            part = parts[user.args[1]]  # type: ignore[index]  # a number
            part.meta.update(user.meta)
            user.replace_all_uses_with(part)
    else:
        found.norm.replace_all_uses_with(parts[0])
    if not found.adds_residual:
        # Others may read the sum over ranks, too. The norm itself is unused by now.
        found.reduced.replace_all_uses_with(
            parts[-1], delete_user_cb=lambda user: user is not found.norm
        )
    return parts


class SequenceParallelism(GraphPass):
    """Splits the rows of norms and residual sums over the ranks (arXiv:2205.05198).

    A sum over ranks becomes a reduce-scatter, and an all-gather follows the norm. Each rank takes a
    part of a stream that all ranks hold. If the ranks do not divide the rows, the last rows are
    padded.
    """

    name: ClassVar[str] = "sequence_parallelism"
    is_default: ClassVar[bool] = False

    def applies(self, sizes: range) -> bool:
        """Return True if a batch may have a row for each rank."""
        return 1 < get_tp_group().world_size < sizes.stop

    def run(self, module: fx.GraphModule, model: nn.Module) -> PassOutcome:
        graph = module.graph
        replaced = 0
        left: list[str] = []
        rows = _Rows(graph, get_tp_group().world_size)
        for node, name, given in semantic_calls(graph, *_NORMS):
            summands = {each: given[each] for each in ("x", "residual") if each in given}
            if not any(_is_sum_of_rows(each) or rows.are_apart(each) for each in summands.values()):
                continue
            if not _has_rows_apart(name, given):
                left.append("one scale is computed of all rows")
                continue
            given.update({each: rows.part(whole, node) for each, whole in summands.items()})
            operator_of_norm: Any = node.target
            with graph.inserting_before(node):
                made = graph.call_function(operator_of_norm, (), given)
            results = list(node.users) if _returns_several(name) else [node]
            for result in results:
                rows.gather(result, made)
            replaced += 1
        return PassOutcome.of(replaced, left)


class _Rows:
    """The tensors of a graph with rows split over the ranks.

    Attributes:
        parts: the node of the part, by the node of the whole tensor.
        sizes: the number of rows of the whole, by the node of the part.
    """

    def __init__(self, graph: fx.Graph, world_size: int) -> None:
        self.graph = graph
        self.world_size = world_size
        self.parts: dict[fx.Node, fx.Node] = {}
        self.sizes: dict[fx.Node, Any] = {}
        self._inputs: dict[str, tuple[fx.Node, int]] = {}
        for node in graph.nodes:
            if node.op == "placeholder":
                for dim, size in enumerate(node.meta["val"].shape):
                    self._inputs[str(size)] = (node, dim)

    def are_apart(self, node: fx.Node) -> bool:
        """Return True if the rows of a tensor are split."""
        return node in self.parts

    def part(self, whole: fx.Node, reader: fx.Node) -> fx.Node:
        """Return the part of a tensor on each rank. A whole tensor is split before ``reader``."""
        if whole in self.parts:
            return self.parts[whole]
        if _is_sum_of_rows(whole):
            source: Any = whole.args[0]
            with self.graph.inserting_before(whole):
                part = self._made("reduce_scatter_rows", source)
                self._replace(whole, part)
            return part
        with self.graph.inserting_before(reader):
            part = self._made("rows_of_rank", whole)
        self.parts[whole] = part
        return part

    def _made(self, name: str, source: fx.Node) -> fx.Node:
        """Call an operator that returns the part of a tensor on each rank."""
        part = self._called(name, source, self.world_size)
        self.sizes[part] = self._size(source)
        return part

    def gather(self, whole: fx.Node, made: fx.Node) -> None:
        """Put the gathered result of ``made`` in the place of a whole result."""
        with self.graph.inserting_before(whole):
            part = made
            if whole.target is operator.getitem:
                part = self.graph.call_function(operator.getitem, (made, whole.args[1]))
            self.sizes[part] = self.sizes[made.kwargs["x"]]  # type: ignore[index]  # a node
            self._replace(whole, part)

    def _replace(self, whole: fx.Node, part: fx.Node) -> None:
        gathered = self._called("all_gather_rows", part, self.sizes[part], self.world_size)
        gathered.meta.update(whole.meta)
        whole.replace_all_uses_with(gathered)
        self.parts[gathered] = part

    def _size(self, node: Any) -> Any:
        size = node.meta["val"].shape[0]
        if isinstance(size, int):
            return size
        # By an input if possible: the node then has the sum as its only reader.
        place = self._inputs.get(str(size), (node, 0))
        return self.graph.call_function(_aten.sym_size.int, place)

    def _called(self, name: str, *args: Any) -> fx.Node:
        return self.graph.call_function(getattr(_opgraft, name).default, (*args, "tensor"))


def _is_sum_of_rows(node: object) -> bool:
    """Return True if a node sums over the tensor group, with a row or more for each rank."""
    if not isinstance(node, fx.Node) or not _is_all_reduce(node) or node.args[1] != "tensor":
        return False
    shape = node.meta["val"].shape
    if len(shape) < 2:
        return False
    # A dynamic number of rows may be large enough.
    return not isinstance(shape[0], int) or shape[0] >= get_tp_group().world_size


def _has_rows_apart(name: str, given: Mapping[str, Any]) -> bool:
    """Return True if no row of a result depends on another row, such as by one scale for all."""
    if "group_shape" not in given:
        return True
    rows, *_ = given["group_shape"]
    # A given scale serves all rows. A scale that is computed may depend on one row only.
    return bool(rows == (1 if name.endswith("dynamic") else -1))


def _returns_several(name: str) -> bool:
    return name.startswith(_AFTER_SUM) or _returns_scales(name)


def _returns_scales(name: str) -> bool:
    return name.endswith(("dynamic", "fp4"))


class AsyncTensorParallelism(GraphPass):
    """Joins a linear map and a reduce-scatter behind, and an all-gather and a linear map behind.

    ``sequence_parallelism`` leaves these pairs around layers. A kernel computes some rows and sends
    other rows at the same time.
    """

    name: ClassVar[str] = "async_tensor_parallelism"
    is_default: ClassVar[bool] = False

    def run(self, module: fx.GraphModule, model: nn.Module) -> PassOutcome:
        graph = module.graph
        replaced = 0
        left: list[str] = []
        for node in list(graph.nodes):
            found = _scattered_map(node) or _map_of_gathered(node)
            if found is None:
                continue
            form, arguments = found
            if not may_replace(form.name, "linear"):
                left.append(PASSED_OVER)
                continue
            joined = getattr(_opgraft, form.name).default
            with graph.inserting_before(node):
                fused = graph.call_function(joined, arguments)
            node.replace_all_uses_with(fused)
            replaced += 1
        return PassOutcome.of(replaced, left)


Found = tuple[Functional[..., Any], tuple[Any, ...]] | None
"""A form in the place of a node and the node before, with the arguments of the form."""


def _scattered_map(node: fx.Node) -> Found:
    if node.target is not _opgraft.reduce_scatter_rows.default:
        return None
    mapped, *group = node.args
    given = _plain_map(mapped)
    if given is None or len(mapped.users) > 1:  # type: ignore[union-attr]  # a node
        return None
    return functional.linear_reduce_scatter_rows, (*given, *group)


def _map_of_gathered(node: fx.Node) -> Found:
    given = _plain_map(node)
    if given is None:
        return None
    gathered, weight, bias = given
    if gathered.target is not _opgraft.all_gather_rows.default or len(gathered.users) > 1:
        return None
    part, *rows = gathered.args
    return functional.all_gather_rows_linear, (part, weight, bias, *rows)


def _plain_map(node: object) -> tuple[fx.Node, Any, Any] | None:
    """Return input, weight and bias of a linear map without an activation or residual."""
    called = semantic_call(node, "linear")
    if called is None:
        return None
    _, given = called
    if given["activation"] != "none" or given["residual"] is not None:
        return None
    return given["x"], given["weight"], given["bias"]
