"""The passes of opgraft, in order. Matchers compare literals, such as an epsilon, and keep them."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar

import torch

# Registers every form, for the nodes that passes make.
from opgraft import functional as _functional  # noqa: F401
from opgraft.base.text import described
from opgraft.compat.graphs import returns_new_memory
from opgraft.compilation.collective_passes import (
    AllReduceRMSNorm,
    AsyncTensorParallelism,
    SequenceParallelism,
)
from opgraft.compilation.graph_pass import LATER, PASSED_OVER, GraphPass, PassOutcome
from opgraft.compilation.linear_passes import GatedProduct, JointLinears
from opgraft.compilation.nodes import OPERATOR, layout_of, may_replace, semantic_calls
from opgraft.compilation.quantization_passes import (
    AttentionQuantFP8,
    RMSNormQuantFP4,
    RMSNormQuantFP8,
    SiluAndMulQuantFP4,
    SiluAndMulQuantFP8,
)
from opgraft.compilation.rotary_passes import QKNormRope
from opgraft.errors import ConfigError, close_matches
from torch import fx, nn

_aten = torch.ops.aten
_opgraft = torch.ops.opgraft

_ALIASING = frozenset(("view", "reshape", "slice", "expand", "to", "alias", "detach", "contiguous"))
"""Operators that return their argument, or a view of the same memory."""


class NoOps(GraphPass):
    """Removes reshapes, slices, casts and expansions without an effect, and checks of dtypes."""

    name: ClassVar[str] = "no_ops"

    def run(self, module: fx.GraphModule, model: nn.Module) -> PassOutcome:
        found = 0
        for node in list(module.graph.nodes):
            if node.target is _aten._assert_tensor_metadata.default:
                module.graph.erase_node(node)
                found += 1
            elif _changes_nothing(node):
                node.replace_all_uses_with(node.args[0])
                found += 1
        return PassOutcome(found, found)


def _changes_nothing(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, OPERATOR) or target.namespace != "aten" or not node.args:
        return False
    name, _, _ = target.name().removeprefix("aten::").partition(".")
    source = node.args[0]
    if name not in _ALIASING or not isinstance(source, fx.Node) or "val" not in node.meta:
        return False
    # A cast may be told to copy, by place or by name.
    if True in (*node.args[2:], node.kwargs.get("copy")):
        return False
    return bool(layout_of(node.meta["val"]) == layout_of(source.meta.get("val")))


class Copies(GraphPass):
    """Removes copies of memory without another reader, such as copies for kernels in place."""

    name: ClassVar[str] = "copies"

    def run(self, module: fx.GraphModule, model: nn.Module) -> PassOutcome:
        copies = [node for node in module.graph.nodes if node.target is _aten.clone.default]
        needless = [node for node in copies if _is_needless(node)]
        for node in needless:
            node.replace_all_uses_with(node.args[0])
        kept = len(copies) - len(needless)
        reason = "somebody else reads the memory, or it is laid out otherwise"
        return PassOutcome.of(len(needless), [reason] * kept)


def _is_needless(copy: fx.Node) -> bool:
    source = copy.args[0]
    if not isinstance(source, fx.Node) or set(source.users) != {copy}:
        return False
    if not returns_new_memory(source):
        return False
    return bool(layout_of(copy.meta.get("val")) == layout_of(source.meta.get("val")))


class AddRMSNorm(GraphPass):
    """Joins the sum of a residual stream and the norm of the sum into the form for both."""

    name: ClassVar[str] = "add_rms_norm"
    _fused: ClassVar[dict[str, Any]] = {
        "rms_norm": _opgraft.fused_add_rms_norm.default,
        "gemma_rms_norm": _opgraft.fused_add_gemma_rms_norm.default,
    }

    def run(self, module: fx.GraphModule, model: nn.Module) -> PassOutcome:
        graph = module.graph
        replaced = 0
        left: list[str] = []
        order = {node: place for place, node in enumerate(graph.nodes)}
        for norm, name, given in semantic_calls(graph, *self._fused):
            summed = given.pop("x")
            if not _is_sum(summed):
                continue
            others = [each for each in given.values() if isinstance(each, fx.Node)]
            if any(order.get(each, -1) > order.get(summed, -1) for each in others):
                left.append(LATER)
                continue
            if not may_replace(f"fused_add_{name}", name):
                left.append(PASSED_OVER)
                continue
            self._join(graph, norm, summed, self._fused[name], given)
            replaced += 1
        return PassOutcome.of(replaced, left)

    def _join(
        self, graph: fx.Graph, norm: fx.Node, summed: fx.Node, fused: Any, given: Mapping[str, Any]
    ) -> None:
        """Replace a sum and its norm by one call.

        Args:
            graph: has both.
            norm, summed: the calls.
            fused: the function for both.
            given: further arguments of the norm.
        """
        with graph.inserting_before(summed):
            arguments = (*summed.args, *given.values())
            both = graph.call_function(fused, arguments)
            normed = graph.call_function(operator.getitem, (both, 0))
            total = graph.call_function(operator.getitem, (both, 1))
        # A later pass may look for the sum by these.
        total.meta.update(summed.meta)
        norm.replace_all_uses_with(normed)
        summed.replace_all_uses_with(total)


def _is_sum(node: object) -> bool:
    """Return True if a node adds two tensors of one layout, without a scale."""
    if not isinstance(node, fx.Node) or node.target is not _aten.add.Tensor:
        return False
    if node.kwargs or len(node.args) != 2:
        return False
    layouts = []
    for each in node.args:
        if not isinstance(each, fx.Node):
            return False
        # Strides may differ.
        layouts.append(layout_of(each.meta.get("val"))[:3])
    first, second = layouts
    return bool(first == second)


BUILT_IN: tuple[type[GraphPass], ...] = (
    NoOps,
    Copies,
    GatedProduct,
    JointLinears,
    AddRMSNorm,
    RMSNormQuantFP8,
    RMSNormQuantFP4,
    SiluAndMulQuantFP8,
    SiluAndMulQuantFP4,
    AttentionQuantFP8,
    QKNormRope,
    SequenceParallelism,
    AsyncTensorParallelism,
    AllReduceRMSNorm,
)
"""The passes in the order of the runs."""


def passes_of(given: Sequence[Any], switches: Mapping[str, bool]) -> list[GraphPass]:
    """Return the passes to run: opgraft's own, then the passes of the user.

    Args:
        given: the passes of the user, each as ``module:Class``, as a class or as an object.
        switches: by the name of a pass of opgraft, ``False`` to leave the pass out. The default is
            the pass's ``is_default``.

    Raises:
        ConfigError: a name has another form, or leads to no pass.
    """
    known = [each.name for each in BUILT_IN]
    for name in switches:
        if name not in known:
            raise ConfigError(
                f"compilation_config.pass_config has {name!r}: {close_matches(name, known)}"
            )
    return [
        *(each() for each in BUILT_IN if switches.get(each.name, each.is_default)),
        *map(_user_pass, given),
    ]


def _user_pass(given: Any) -> GraphPass:
    """Return a pass of the user.

    Raises:
        ConfigError: the pass cannot be constructed, is no ``GraphPass``, or has no name.
    """
    told = f"compilation_config.user_passes has {given!r}"
    try:
        made = _made(given)
    # The user's code may raise anything.
    except Exception as error:
        raise ConfigError(
            f"{told}, which cannot be constructed: {described(error)}. Name a class as "
            "module:Class, or give an object"
        ) from error
    if not isinstance(made, GraphPass):
        raise ConfigError(f"{told}, which is no opgraft.GraphPass: derive it so")
    if not isinstance(getattr(made, "name", None), str):
        raise ConfigError(f"{told}, whose name is no text: give the class a name")
    return made


def _made(given: Any) -> Any:
    """Return an object of a class, or of the class with a name. An object is returned itself."""
    if isinstance(given, str):
        module, _, attribute = given.partition(":")
        return getattr(import_module(module), attribute)()
    return given() if isinstance(given, type) else given
