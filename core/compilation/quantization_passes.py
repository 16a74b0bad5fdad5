"""Passes that join a computation and the quantisation of its result to floats of 8 or 4 bits."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from opgraft.compilation.graph_pass import PASSED_OVER, GraphPass, PassOutcome
from opgraft.compilation.nodes import OPERATOR, has_kernel, semantic_call, semantic_calls

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
        _merge_equal(module.graph, self.quantizers)
        replaced, left = 0, list[str]()
        order = {node: place for place, node in enumerate(module.graph.nodes)}
        for node, name, given in semantic_calls(module.graph, *self.quantizers):
            source = _source_of(given.pop("x"), self.forms)
            if source is None:
                continue
            made, form, arguments = source
            if any(
                order.get(each, 0) > order[made]
                for each in given.values()
                if isinstance(each, fx.Node)
            ):
                left.append(f"a scale is computed after {form}")
                continue
            if (has_kernel(form) or has_kernel(name)) and not has_kernel(f"{form}_{name}"):
                left.append(PASSED_OVER)
                continue
            _join_with_quantization(
                module.graph, made, node, f"{form}_{name}", {**arguments, **given}
            )
            replaced += 1
        return PassOutcome.of(replaced, left)


class RMSNormQuantFP8(_QuantizedResult):
    """Joins a norm, after a sum too, and the quantisation of its result to 8 bits."""

    name: ClassVar[str] = "rms_norm_quant_fp8"
    forms: ClassVar[tuple[str, ...]] = _NORMS
    quantizers: ClassVar[tuple[str, ...]] = _FP8


class RMSNormQuantFP4(_QuantizedResult):
    """Joins a norm, after a sum too, and the quantisation of its result to 4 bits."""

    name: ClassVar[str] = "rms_norm_quant_fp4"
    forms: ClassVar[tuple[str, ...]] = _NORMS
    quantizers: ClassVar[tuple[str, ...]] = _FP4


class SiluAndMulQuantFP8(_QuantizedResult):
    """Joins a gated activation and the quantisation of its result to 8 bits."""

    name: ClassVar[str] = "silu_and_mul_quant_fp8"
    forms: ClassVar[tuple[str, ...]] = ("silu_and_mul",)
    quantizers: ClassVar[tuple[str, ...]] = _FP8


class SiluAndMulQuantFP4(_QuantizedResult):
    """Joins a gated activation and the quantisation of its result to 4 bits."""

    name: ClassVar[str] = "silu_and_mul_quant_fp4"
    forms: ClassVar[tuple[str, ...]] = ("silu_and_mul",)
    quantizers: ClassVar[tuple[str, ...]] = _FP4


class AttentionQuantFP8(GraphPass):
    """Joins attention and the quantisation of the result by one scale, past moves of the heads."""

    name: ClassVar[str] = "attention_quant_fp8"
    _form: ClassVar[str] = "scaled_dot_product_attention"

    def run(self, module: fx.GraphModule, model: nn.Module) -> PassOutcome:
        _merge_equal(module.graph, _FP8)
        replaced, left = 0, list[str]()
        order = {node: place for place, node in enumerate(module.graph.nodes)}
        for node, name, given in semantic_calls(module.graph, "quant_fp8_static"):
            moved = _moved(given["x"])
            attention: Any = moved[0].args[0] if moved else given["x"]
            called = semantic_call(attention, self._form)
            if (
                called is None
                or len(attention.users) > 1
                or tuple(given["group_shape"]) != (-1, -1)
            ):
                continue
            arguments = called[1]
            if arguments.pop("dropout_p"):
                continue
            fused = f"{self._form}_{name}"
            scale = given["scale"]
            if (has_kernel(self._form) or has_kernel(name)) and not has_kernel(fused):
                left.append(PASSED_OVER)
                continue
            if order.get(scale, 0) > order[attention]:
                left.append(f"a scale is computed after {self._form}")
                continue
            _quantize_before(
                module.graph,
                fused,
                {**arguments, "output_scale": scale, "dtype": given["dtype"]},
                moved,
                node,
            )
            replaced += 1
        return PassOutcome.of(replaced, left)


_MOVES = frozenset(("transpose", "permute", "contiguous", "clone", "reshape", "view", "flatten"))
"""Operators that move elements and change none."""


def _moved(x: Any) -> list[fx.Node]:
    """Return the operators that have moved the elements of ``x``, in order.

    The search ends at an operator with another reader of the result.
    """
    found: list[fx.Node] = []
    while isinstance(x.target, OPERATOR) and x.target.namespace == "aten" and len(x.users) == 1:
        if x.target.name().removeprefix("aten::").partition(".")[0] not in _MOVES:
            break
        found.append(x)
        x = x.args[0]
    return found[::-1]


def _quantize_before(
    graph: fx.Graph,
    name: str,
    arguments: Mapping[str, Any],
    moved: Sequence[fx.Node],
    quantized: fx.Node,
) -> None:
    """Quantise a result before the moves of elements, and move the quantised elements."""
    with graph.inserting_before(quantized):
        result = graph.call_function(getattr(_opgraft, name).default, (), dict(arguments))
        for each in moved:
            result = graph.call_function(each.target, (result, *each.args[1:]), each.kwargs)  # type: ignore[arg-type]
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
    called = semantic_call(x.args[0] if is_first else x, *forms)
    if called is None or called[1].pop("variance_size", None) is not None:
        return None
    made = x.args[0] if is_first else x
    return (made, *called) if isinstance(made, fx.Node) else None


def _join_with_quantization(
    graph: fx.Graph, made: fx.Node, quantized: fx.Node, name: str, arguments: Mapping[str, Any]
) -> None:
    """Put one form in the place of two.

    Args:
        graph: the graph.
        made: the first form, which may return a sum besides.
        quantized: the second form, which may return a scale besides.
        name: the name of the new form.
        arguments: the arguments of the new form.
    """
    with graph.inserting_before(made):
        fused = graph.call_function(getattr(_opgraft, name).default, (), dict(arguments))
    tupled, has_sum = not name.endswith("static"), name.startswith("fused_add")
    if not tupled and not has_sum:
        quantized.replace_all_uses_with(fused)
        return
    with graph.inserting_after(fused):
        parts = [
            graph.call_function(operator.getitem, (fused, place))
            for place in range(1 + tupled + has_sum)
        ]
    if not tupled:
        quantized.replace_all_uses_with(parts[0])
    for user in list(quantized.users) if tupled else ():
        user.replace_all_uses_with(parts[user.args[1]])  # type: ignore[index]
    for user in [each for each in made.users if each.args[1:] == (1,)] if has_sum else ():
        parts[-1].meta.update(user.meta)
        user.replace_all_uses_with(parts[-1])
