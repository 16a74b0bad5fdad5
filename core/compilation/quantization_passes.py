"""Passes that join a computation and the quantisation of its result to floats of 8 or 4 bits."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from opgraft.compilation.graph_pass import PASSED_OVER, GraphPass, PassOutcome
from opgraft.compilation.nodes import OPERATOR, may_replace, semantic_call, semantic_calls

# Registers the forms.
from opgraft.ops.fused.quantization import functional as _functional  # noqa: F401
from torch import fx, nn

_opgraft = torch.ops.opgraft
_FP8 = ("quant_fp8_static", "quant_fp8_dynamic")
_FP4 = ("quant_fp4",)
_NORMS = ("rms_norm", "fused_add_rms_norm")


class _QuantizedResult(GraphPass):
    """Joins a form and the quantisation of the result, if the result has no other reader."""

    forms: ClassVar[tuple[str, ...]]
    quantizers: ClassVar[tuple[str, ...]]

    def run(self, module: fx.GraphModule, model: nn.Module) -> PassOutcome:
        graph = module.graph
        _merge_equal(graph, self.quantizers)
        replaced = 0
        left: list[str] = []
        order = {node: place for place, node in enumerate(graph.nodes)}
        for node, name, given in semantic_calls(graph, *self.quantizers):
            source = _source_of(given.pop("x"), self.forms)
            if source is None:
                continue
            made, form, arguments = source
            scales = [each for each in given.values() if isinstance(each, fx.Node)]
            if any(order.get(each, 0) > order[made] for each in scales):
                left.append(f"a scale is computed after {form}")
                continue
            fused = f"{form}_{name}"
            if not may_replace(fused, form, name):
                left.append(PASSED_OVER)
                continue
            _join_with_quantization(graph, made, node, fused, {**arguments, **given})
            replaced += 1
        return PassOutcome.of(replaced, left)


class RMSNormQuantFP8(_QuantizedResult):
    """Joins a norm, with or without a sum before, and the quantisation to 8 bits."""

    name: ClassVar[str] = "rms_norm_quant_fp8"
    forms: ClassVar[tuple[str, ...]] = _NORMS
    quantizers: ClassVar[tuple[str, ...]] = _FP8


class RMSNormQuantFP4(_QuantizedResult):
    """Joins a norm, with or without a sum before, and the quantisation to 4 bits."""

    name: ClassVar[str] = "rms_norm_quant_fp4"
    forms: ClassVar[tuple[str, ...]] = _NORMS
    quantizers: ClassVar[tuple[str, ...]] = _FP4


class SiluAndMulQuantFP8(_QuantizedResult):
    """Joins a gated activation and the quantisation of the result to 8 bits."""

    name: ClassVar[str] = "silu_and_mul_quant_fp8"
    forms: ClassVar[tuple[str, ...]] = ("silu_and_mul",)
    quantizers: ClassVar[tuple[str, ...]] = _FP8


class SiluAndMulQuantFP4(_QuantizedResult):
    """Joins a gated activation and the quantisation of the result to 4 bits."""

    name: ClassVar[str] = "silu_and_mul_quant_fp4"
    forms: ClassVar[tuple[str, ...]] = ("silu_and_mul",)
    quantizers: ClassVar[tuple[str, ...]] = _FP4


class AttentionQuantFP8(GraphPass):
    """Joins attention and the quantisation of the result by one scale, past moves of the heads."""

    name: ClassVar[str] = "attention_quant_fp8"
    _form: ClassVar[str] = "scaled_dot_product_attention"

    def run(self, module: fx.GraphModule, model: nn.Module) -> PassOutcome:
        graph = module.graph
        _merge_equal(graph, _FP8)
        replaced = 0
        left: list[str] = []
        order = {node: place for place, node in enumerate(graph.nodes)}
        for node, name, given in semantic_calls(graph, "quant_fp8_static"):
            x = given["x"]
            moved = _moved(x)
            attention: Any = moved[0].args[0] if moved else x
            arguments = self._arguments_of(attention)
            # The elements move between both forms, so one scale must serve all of them.
            if arguments is None or not _has_one_scale(given):
                continue
            fused = f"{self._form}_{name}"
            if not may_replace(fused, self._form, name):
                left.append(PASSED_OVER)
                continue
            scale = given["scale"]
            if order.get(scale, 0) > order[attention]:
                left.append(f"a scale is computed after {self._form}")
                continue
            arguments.update(output_scale=scale, dtype=given["dtype"])
            _quantize_before(graph, fused, arguments, moved, node)
            replaced += 1
        return PassOutcome.of(replaced, left)

    def _arguments_of(self, attention: Any) -> dict[str, Any] | None:
        """Return the arguments of attention with one reader and no dropout; otherwise ``None``."""
        called = semantic_call(attention, self._form)
        if called is None or len(attention.users) > 1:
            return None
        _, arguments = called
        # The form with quantisation has no such argument.
        return None if arguments.pop("dropout_p") else arguments


_MOVES = frozenset(("transpose", "permute", "contiguous", "clone", "reshape", "view", "flatten"))
"""Operators that move elements and change none."""


def _moved(x: Any) -> list[fx.Node]:
    """Return the operators that have moved the elements of ``x``, in order.

    The search ends at an operator with another reader of the result.
    """
    found: list[fx.Node] = []
    while _is_move(x) and len(x.users) == 1:
        found.append(x)
        x = x.args[0]
    return found[::-1]


def _is_move(x: Any) -> bool:
    if not isinstance(x.target, OPERATOR) or x.target.namespace != "aten":
        return False
    name, _, _ = x.target.name().removeprefix("aten::").partition(".")
    return name in _MOVES


def _quantize_before(
    graph: fx.Graph,
    name: str,
    arguments: Mapping[str, Any],
    moved: Sequence[fx.Node],
    quantized: fx.Node,
) -> None:
    """Quantise a result before the moves of elements, and move the quantised elements."""
    with graph.inserting_before(quantized):
        form = getattr(_opgraft, name).default
        result = graph.call_function(form, (), dict(arguments))
        for each in moved:
            move: Any = each.target
            result = graph.call_function(move, (result, *each.args[1:]), each.kwargs)
        if moved:
            result = graph.call_function(torch.ops.aten.contiguous.default, (result,))
    quantized.replace_all_uses_with(result)


def _merge_equal(graph: fx.Graph, quantizers: Sequence[str]) -> None:
    """Keep one of several equal quantisations of a tensor."""
    first: dict[Any, fx.Node] = {}
    for node, name, given in semantic_calls(graph, *quantizers):
        # The text of a node is its unique name.
        kept = first.setdefault((name, *map(str, given.items())), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)


def _source_of(x: object, forms: tuple[str, ...]) -> tuple[fx.Node, str, dict[str, Any]] | None:
    """Return the node that makes a tensor by one of the forms, the form, and its arguments."""
    if not isinstance(x, fx.Node) or len(x.users) != 1:
        return None
    is_first = x.target is operator.getitem and x.args[1] == 0
    made = x.args[0] if is_first else x
    called = semantic_call(made, *forms)
    if called is None or not isinstance(made, fx.Node):
        return None
    name, arguments = called
    # The forms with quantisation have no norm over a part of each row.
    if arguments.pop("variance_size", None) is not None:
        return None
    return made, name, arguments


def _join_with_quantization(
    graph: fx.Graph, made: fx.Node, quantized: fx.Node, name: str, arguments: Mapping[str, Any]
) -> None:
    """Put one form in the place of two.

    Args:
        graph: the graph.
        made: the node of the first form. It returns a sum, too, if the form adds first.
        quantized: the node of the second form. It returns a scale, too, unless the scale is given.
        name: the name of the new form.
        arguments: the arguments of the new form.
    """
    form = getattr(_opgraft, name).default
    with graph.inserting_before(made):
        fused = graph.call_function(form, (), dict(arguments))
    returns_scale = not name.endswith("static")
    returns_sum = name.startswith("fused_add")
    if not returns_scale and not returns_sum:
        quantized.replace_all_uses_with(fused)
        return
    with graph.inserting_after(fused):
        parts = []
        for place in range(1 + returns_scale + returns_sum):
            parts.append(graph.call_function(operator.getitem, (fused, place)))
    if returns_scale:
        for user in list(quantized.users):
            place_of_user: Any = user.args[1]
            user.replace_all_uses_with(parts[place_of_user])
    else:
        quantized.replace_all_uses_with(parts[0])
    if returns_sum:
        total = parts[-1]
        readers = [each for each in made.users if each.args[1:] == (1,)]
        for user in readers:
            total.meta.update(user.meta)
            user.replace_all_uses_with(total)


def _has_one_scale(given: Mapping[str, Any]) -> bool:
    """Return True if a call quantizes all elements by one scale."""
    return tuple(given["group_shape"]) == (-1, -1)
