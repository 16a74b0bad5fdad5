"""Passes that join linear maps of one tensor into a single map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from opgraft.compilation.graph_pass import GraphPass, PassOutcome
from opgraft.compilation.nodes import JOINT, PARTS, Origin, semantic_call, semantic_calls
from opgraft.ops.composites.gated_mlp import GatedMLP
from opgraft.ops.composites.joint import JointLayer, joint_parameters
from torch import Tensor, fx, nn

_aten = torch.ops.aten
_opgraft = torch.ops.opgraft


class GatedProduct(GraphPass):
    """Joins gate, up and the gated activation of a feed-forward layer: one linear map, one form.

    The pass takes no memory: both weights lie in one memory already, as in a ``GatedMLP``.
    """

    name: ClassVar[str] = "gated_product"

    def run(self, module: fx.GraphModule, model: nn.Module) -> PassOutcome:
        graph = module.graph
        replaced = 0
        left: list[str] = []
        for node in list(graph.nodes):
            found = _gated_product(node) if node.target is _aten.mul.Tensor else None
            if found is None:
                continue
            act, given, gate, up = found
            paths = _joined_layers(model, gate, up)
            tensors = paths and joint_parameters([model.get_submodule(path) for path in paths])
            if not paths or not tensors:
                left.append("the weights of gate and up do not lie together")
                continue
            target = _opgraft.silu_and_mul if act == "silu" else _opgraft.gelu_and_mul
            with graph.inserting_before(node):
                placed = _hold_joint(module, model, paths, tensors)
                joint = graph.call_function(_opgraft.linear.default, (gate["x"], *placed))
                product = graph.call_function(target.default, (joint, *given))
            node.replace_all_uses_with(product)
            replaced += 1
        return PassOutcome.of(replaced, left)


def _gated_product(
    product: fx.Node,
) -> tuple[str, tuple[Any, ...], dict[str, Any], dict[str, Any]] | None:
    """Find ``act(gate) · up``.

    Returns:
        The activation's name and settings, and the arguments of both linear maps; ``None`` for any
        other product.
    """
    called = semantic_call(product.args[0], "silu", "gelu")
    other = semantic_call(product.args[1], "linear")
    if called is None or other is None:
        return None
    act, settings = called
    inner = settings.pop("x")
    gated = semantic_call(inner, "linear")
    used_once: Any = (product.args[0], product.args[1], inner)
    if gated is None or any(len(node.users) > 1 for node in used_once):
        return None
    _, gate = gated
    _, up = other
    if gate["x"] is not up["x"] or not _is_plain(gate) or not _is_plain(up):
        return None
    return act, tuple(settings.values()), gate, up


def _is_plain(given: Mapping[str, Any]) -> bool:
    """Return True if a linear map has neither an activation nor a residual."""
    return given["activation"] == "none" and given["residual"] is None


def _joined_layers(
    model: nn.Module, gate: dict[str, Any], up: dict[str, Any]
) -> tuple[str, str] | None:
    """Return the paths of gate and up if a layer of the model holds their weights in one memory."""
    paths = [str(each["weight"].target) for each in (gate, up) if each["weight"].op == "get_attr"]
    parts = [path.removesuffix(".weight").rpartition(".") for path in paths]
    if len(parts) < 2 or parts[0][0] != parts[1][0]:
        return None
    parent = parts[0][0]
    names = (parts[0][2], parts[1][2])
    layer = model.get_submodule(parent)
    if not isinstance(layer, GatedMLP) or layer.joined != names:
        return None
    # Somebody may provide a kernel for the activation alone.
    if "act_and_mul" in layer.idle() or not layer.computes_jointly():
        return None
    return f"{parent}.{names[0]}".lstrip("."), f"{parent}.{names[1]}".lstrip(".")


def _hold_joint(
    module: fx.GraphModule,
    model: nn.Module,
    paths: Sequence[str],
    tensors: Mapping[str, nn.Parameter],
) -> list[fx.Node | None]:
    """Give a graph the joint parameters of layers; return the nodes of weight and bias."""
    placed: list[fx.Node | None] = []
    for name in ("weight", "bias"):
        if name not in tensors:
            placed.append(None)
            continue
        parts = [getattr(model.get_submodule(path), name) for path in paths]
        placed.append(
            _add_joint_parameter(module, tensors[name], parts, ("together", name, *paths))
        )
    return placed


def _add_joint_parameter(
    module: fx.GraphModule, tensor: nn.Parameter, parts: Sequence[Tensor], origin: Origin
) -> fx.Node:
    """Give a graph a parameter in the memory of others; return the node of the parameter."""
    named = module.named_parameters(recurse=False)
    number = sum(name.startswith("joint_") for name, _ in named)
    module.register_parameter(f"joint_{number}", tensor)
    node = module.graph.get_attr(f"joint_{number}")
    node.meta[PARTS] = parts
    node.meta[JOINT] = origin
    return node


class JointLinears(GraphPass):
    """Joins linear maps of one tensor, such as query, key and value, into one map.

    The weights move next to each other in memory, if each has memory of its own. So the pass takes
    no memory in the end.
    """

    name: ClassVar[str] = "joint_linears"

    def run(self, module: fx.GraphModule, model: nn.Module) -> PassOutcome:
        groups: dict[fx.Node, list[tuple[fx.Node, str]]] = {}
        for node, _, given in semantic_calls(module.graph, "linear"):
            path = _layer_of(given)
            if path is None:
                continue
            parent = model.get_submodule(path.rpartition(".")[0])
            # A joint layer decides for itself.
            if not isinstance(parent, JointLayer):
                groups.setdefault(given["x"], []).append((node, path))
        joined = [_joined(module, model, x, group) for x, group in groups.items() if len(group) > 1]
        return PassOutcome.of(sum(joined), ["weights cannot lie together"] * joined.count(False))


def _layer_of(given: dict[str, Any]) -> str | None:
    """Return the path of a plain linear map's layer; ``None`` for other maps."""
    weight = given["weight"]
    bias = given["bias"]
    if not _is_plain(given) or weight.op != "get_attr":
        return None
    path, _, name = str(weight.target).rpartition(".")
    if name != "weight":
        return None
    has_own_bias = bias is None or (bias.op == "get_attr" and bias.target == f"{path}.bias")
    return path if has_own_bias else None


def _joined(
    module: fx.GraphModule, model: nn.Module, x: fx.Node, group: Sequence[tuple[fx.Node, str]]
) -> bool:
    """Join the linear maps of a group; return False if the weights cannot lie together.

    Args:
        module: the graph.
        model: the model of the graph.
        x: the input of the maps.
        group: the nodes of the maps, each with the path of the layer.
    """
    graph = module.graph
    paths = [path for _, path in group]
    layers: list[Any] = [model.get_submodule(path) for path in paths]
    tensors = joint_parameters(layers)
    if tensors is None:
        return False
    first, _ = group[0]
    with graph.inserting_before(first):
        placed = _hold_joint(module, model, paths, tensors)
        joint = graph.call_function(_opgraft.linear.default, (x, *placed))
        start = 0
        for (node, _), layer in zip(group, layers, strict=True):
            end = start + layer.weight.shape[0]
            part = graph.call_function(_aten.slice.Tensor, (joint, -1, start, end))
            result = graph.call_function(_aten.contiguous.default, (part,))
            node.replace_all_uses_with(result)
            start = end
    return True
