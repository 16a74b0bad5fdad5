"""Passes over the collectives of a model whose layers ranks share, and what is around them."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from opgraft.binding.functional import Functional
from opgraft.compilation.graph_pass import GraphPass, Outcome
from opgraft.compilation.nodes import has_kernel, semantic_calls
from opgraft.ops.fused_collectives import functional
from torch import fx, nn

_opgraft = torch.ops.opgraft

_AFTER_SUM = "fused_add_"
"""The beginning of the names of forms that add a residual first, whose last result is the sum."""

_FUSED: dict[str, Functional[..., Any]] = {
    "rms_norm": functional.all_reduce_rms_norm,
    "gemma_rms_norm": functional.all_reduce_gemma_rms_norm,
    "rms_norm_quant_fp8_static": functional.all_reduce_rms_norm_quant_fp8_static,
    "rms_norm_quant_fp8_dynamic": functional.all_reduce_rms_norm_quant_fp8_dynamic,
}
"""By form of a norm, quantised too: the form that sums over ranks before."""

_NORMS = (*_FUSED, *(f"{_AFTER_SUM}{name}" for name in _FUSED))


def _is_all_reduce(node: object) -> bool:
    return isinstance(node, fx.Node) and node.target is _opgraft.all_reduce.default


class AllReduceRMSNorm(GraphPass):
    """Joins a sum over ranks, that of a residual stream, and the norm of it, quantised too, into one form."""

    name: ClassVar[str] = "all_reduce_rms_norm"

    def run(self, module: fx.GraphModule, model: nn.Module) -> Outcome:
        matched = replaced = 0
        order = {node: place for place, node in enumerate(module.graph.nodes)}
        for node, name, given in semantic_calls(module.graph, *_NORMS):
            summands = [given.pop(each) for each in ("x", "residual") if each in given]
            reduced = max((each for each in summands if _is_all_reduce(each)), key=order.__getitem__, default=None)
            if reduced is None or given.pop("variance_size", None) is not None:
                continue
            matched += 1
            others = [each for each in summands if each is not reduced]
            if len(summands) > 1 and (not others or len(reduced.users) > 1):
                continue  # the sum over ranks alone is read, too
            before = order[reduced]
            if any(order.get(each, 0) > before for each in (*others, *given.values()) if isinstance(each, fx.Node)):
                continue  # an argument that is computed later
            fused = _FUSED[name.removeprefix(_AFTER_SUM)].name
            if has_kernel(name) and not has_kernel(fused):
                continue  # a provider's kernel is not passed over
            x, kind = reduced.args
            arguments = {"x": x, "residual": others[0] if others else None, **given, "kind": kind}
            _join(module.graph, reduced, node, fused, arguments, bool(others))
            replaced += 1
        return Outcome(matched, replaced)


def _join(
    graph: fx.Graph, reduced: fx.Node, norm: fx.Node, name: str, arguments: Mapping[str, Any], has_sum: bool
) -> None:
    """Put one form in the place of a sum over ranks and a norm, which returns a sum besides if it ``has_sum``."""
    scaled = name.endswith("dynamic")
    with graph.inserting_before(reduced):
        fused = graph.call_function(getattr(_opgraft, name).default, (), dict(arguments))
        parts = [graph.call_function(operator.getitem, (fused, place)) for place in range(2 + scaled)]
    if has_sum or scaled:
        for user in list(norm.users):
            parts[user.args[1]].meta.update(user.meta)  # type: ignore[index]
            user.replace_all_uses_with(parts[user.args[1]])  # type: ignore[index]
    else:
        norm.replace_all_uses_with(parts[0])
    if not has_sum:
        reduced.replace_all_uses_with(parts[-1], delete_user_cb=lambda user: user is not norm)
