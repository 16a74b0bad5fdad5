"""Passes over the collectives of a model with shared layers: sums, norms and maps around them."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from opgraft.binding.functional import Functional
from opgraft.compilation.graph_pass import LATER, PASSED_OVER, GraphPass, PassOutcome
from opgraft.compilation.nodes import has_kernel, semantic_call, semantic_calls
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
        replaced, left = 0, list[str]()
        order = {node: place for place, node in enumerate(module.graph.nodes)}
        for node, name, given in semantic_calls(module.graph, *_NORMS):
            summands = [given.pop(each) for each in ("x", "residual") if each in given]
            reduced = max(
                (each for each in summands if _is_all_reduce(each)),
                key=order.__getitem__,
                default=None,
            )
            if reduced is None or given.pop("variance_size", None) is not None:
                continue
            others = [each for each in summands if each is not reduced]
            if len(summands) > 1 and (not others or len(reduced.users) > 1):
                left.append("the sum over ranks alone is read, too")
                continue
            before = order[reduced]
            if any(
                order[each] > before
                for each in (*others, *given.values())
                if isinstance(each, fx.Node)
            ):
                left.append(LATER)
                continue
            fused = _FUSED[name.removeprefix(_AFTER_SUM)].name
            if has_kernel(name) and not has_kernel(fused):
                left.append(PASSED_OVER)
                continue
            x, kind = reduced.args
            arguments = {"x": x, "residual": others[0] if others else None, **given, "kind": kind}
            parts = _join_sum_and_norm(module.graph, reduced, node, fused, arguments, bool(others))
            order.update(dict.fromkeys(parts, before))
            replaced += 1
        return PassOutcome.of(replaced, left)


def _join_sum_and_norm(
    graph: fx.Graph,
    reduced: fx.Node,
    norm: fx.Node,
    name: str,
    arguments: Mapping[str, Any],
    has_sum: bool,
) -> list[fx.Node]:
    """Put one form in the place of a sum over ranks and a norm.

    Args:
        graph: the graph.
        reduced: the sum over ranks.
        norm: the norm, which returns a sum besides if ``has_sum``.
        name: the name of the form.
        arguments: the arguments of the form.
        has_sum: the norm adds a residual.

    Returns:
        The results of the form.
    """
    scaled = _returns_scales(name)
    with graph.inserting_before(reduced):
        fused = graph.call_function(getattr(_opgraft, name).default, (), dict(arguments))
        parts = [
            graph.call_function(operator.getitem, (fused, place)) for place in range(2 + scaled)
        ]
    if has_sum or scaled:
        for user in list(norm.users):
            parts[user.args[1]].meta.update(user.meta)  # type: ignore[index]
            user.replace_all_uses_with(parts[user.args[1]])  # type: ignore[index]
    else:
        norm.replace_all_uses_with(parts[0])
    if not has_sum:
        reduced.replace_all_uses_with(parts[-1], delete_user_cb=lambda user: user is not norm)
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
        replaced, left = 0, list[str]()
        rows = _Rows(module.graph, get_tp_group().world_size)
        for node, name, given in semantic_calls(module.graph, *_NORMS):
            summands = [each for each in ("x", "residual") if each in given]
            if not any(
                rows.are_apart(given[each]) or _is_sum_of_rows(given[each]) for each in summands
            ):
                continue
            if not _has_rows_apart(name, given):
                left.append("one scale is computed of all rows")
                continue
            given.update({each: rows.part(given[each], node) for each in summands})
            with module.graph.inserting_before(node):
                made = module.graph.call_function(node.target, (), given)  # type: ignore[arg-type]  # an operator
            for result in list(node.users) if _returns_several(name) else [node]:
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
        self._inputs = {
            str(size): (node, dim)
            for node in graph.nodes
            if node.op == "placeholder"
            for dim, size in enumerate(node.meta["val"].shape)
        }

    def are_apart(self, node: fx.Node) -> bool:
        """Return True if the rows of a tensor are split."""
        return node in self.parts

    def part(self, whole: fx.Node, reader: fx.Node) -> fx.Node:
        """Return the part of a tensor on each rank. A whole tensor is split before ``reader``."""
        if whole in self.parts:
            return self.parts[whole]
        summed = _is_sum_of_rows(whole)
        source, target = (
            (whole.args[0], "reduce_scatter_rows") if summed else (whole, "rows_of_rank")
        )
        with self.graph.inserting_before(whole if summed else reader):
            part = self._called(target, source, self.world_size)
            self.sizes[part] = self._size(source)
            if summed:
                self._replace(whole, part)
            else:
                self.parts[whole] = part
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
        return self.graph.call_function(_aten.sym_size.int, self._inputs.get(str(size), (node, 0)))

    def _called(self, name: str, *args: Any) -> fx.Node:
        return self.graph.call_function(getattr(_opgraft, name).default, (*args, "tensor"))


def _is_sum_of_rows(node: object) -> bool:
    """Return True if a node sums over the tensor group, with a row or more for each rank."""
    if not isinstance(node, fx.Node) or not _is_all_reduce(node) or node.args[1] != "tensor":
        return False
    shape = node.meta["val"].shape
    return len(shape) > 1 and not (
        isinstance(shape[0], int) and shape[0] < get_tp_group().world_size
    )


def _has_rows_apart(name: str, given: Mapping[str, Any]) -> bool:
    """Return True if no row of a result depends on another row, such as by one scale for all."""
    if "group_shape" not in given:
        return True
    return bool(given["group_shape"][0] == (1 if name.endswith("dynamic") else -1))


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
        replaced, left = 0, list[str]()
        for node in list(module.graph.nodes):
            found = _scattered_map(node) or _map_of_gathered(node)
            if found is None:
                continue
            form, arguments = found
            if has_kernel("linear") and not has_kernel(form.name):
                left.append(PASSED_OVER)
                continue
            with module.graph.inserting_before(node):
                fused = module.graph.call_function(getattr(_opgraft, form.name).default, arguments)
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
    given = called[1]
    plain = given["activation"] == "none" and given["residual"] is None
    return (given["x"], given["weight"], given["bias"]) if plain else None
