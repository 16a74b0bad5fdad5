"""The tensors of a graph by their places in a model, for finding them in another process."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from opgraft.compat.ahead_of_time import places_of
from opgraft.compilation.description import modules_of
from opgraft.compilation.nodes import JOINT, Origin, attribute_of
from opgraft.errors import CacheEntryError, CompilationError
from opgraft.machine.memory import move_to_huge_pages
from opgraft.ops.composites.joint import JointLayer, joint_parameters
from torch import Tensor, fx, nn


def origins_of(model: nn.Module, graph: fx.GraphModule) -> dict[str, Origin]:
    """Return the place in the model of each tensor of a graph, by the name of the attribute."""
    modules: dict[str, Any] = modules_of(model)
    handles = {
        int(module._packed.handle): path for path, module in modules.items() if _is_packed(module)
    }
    found: dict[str, Origin] = {}
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            found[str(node.target)] = _origin_of(node, graph, modules, handles)
    return found


def _origin_of(
    node: fx.Node,
    graph: fx.GraphModule,
    modules: Mapping[str, nn.Module],
    handles: Mapping[int, str],
) -> Origin:
    """Return the origin of one tensor.

    Args:
        node: the node of the tensor.
        graph: the graph of the node.
        modules: the modules of the model by path.
        handles: the paths of layers with packed weights, by handle.
    """
    if JOINT in node.meta:
        joint: Origin = node.meta[JOINT]
        return joint
    name = str(node.target)
    tensor = attribute_of(graph, node)
    if _held_at(modules, name) is tensor:
        return ("model", name)
    packed = torch.ops.opgraft.packed_only_linear.default
    if any(user.target is packed for user in node.users):
        return ("packed", handles[int(tensor)])
    return ("value",)


def tensors_of(
    model: nn.Module, origins: Mapping[str, Origin], values: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], tuple[nn.Parameter, ...]]:
    """Find the tensors of a graph in a model.

    Args:
        model: the model of the graph.
        origins: the result of ``origins_of``.
        values: by name, the tensors outside of the model.

    Returns:
        The tensors by name, and the parameters in joint memory.

    Raises:
        CacheEntryError: the model has no such tensor.
    """
    modules = modules_of(model)
    found: dict[str, Tensor] = {}
    parts: list[nn.Parameter] = []
    for name, (kind, *place) in origins.items():
        tensor: Any = None
        if kind == "model":
            tensor = _held_at(modules, place[0])
        elif kind == "together":
            attribute, *paths = place
            tensor, joined = _joint(modules, attribute, paths)
            parts += joined
        elif kind == "packed":
            packed: Any = modules[place[0]]
            tensor = packed._packed.handle if _is_packed(packed) else None
        else:
            tensor = values.get(name)
        if not isinstance(tensor, Tensor):
            raise CacheEntryError(f"the model has no tensor {name!r} as {kind} {'.'.join(place)!r}")
        found[name] = tensor
    move_joint(parts)
    return found, tuple(parts)


def _joint(
    modules: Mapping[str, nn.Module], attribute: str, paths: Sequence[str]
) -> tuple[Tensor | None, list[nn.Parameter]]:
    """Return the joint tensor of some layers, and the parameters in its memory."""
    parent = modules[paths[0].rpartition(".")[0]]
    # A layer that computes its children one by one needs another graph.
    if isinstance(parent, JointLayer) and not parent.computes_jointly():
        return None, []
    layers: list[Any] = [modules[path] for path in paths]
    tensors = joint_parameters(layers) or {}
    return tensors.get(attribute), [getattr(layer, attribute) for layer in layers]


def move_joint(parts: Iterable[Tensor]) -> None:
    """Move the joint memory of parameters to huge pages, after the first output."""
    ranges = (range(p.data_ptr(), p.data_ptr() + p.nbytes) for p in parts if p.is_cpu)
    move_to_huge_pages(ranges, wait=1.0)


class ModulePlaces:
    """The places of modules in a model, and of the parameters and buffers that graphs use.

    Args:
        model: the model as it is now.
        used: the tensors of the graphs.
        joint: parameters in joint memory, which must not move.
    """

    def __init__(
        self, model: nn.Module, used: Iterable[Tensor], joint: Iterable[nn.Parameter]
    ) -> None:
        self._kind = type(model).__name__
        known = {id(tensor) for tensor in used}
        held = [
            (path, store, name)
            for path, module in modules_of(model).items()
            for store in (module._modules, module._parameters, module._buffers)
            for name, value in store.items()
            if isinstance(store, dict) and (id(value) in known or isinstance(value, nn.Module))
        ]
        self._paths = [path for path, _, _ in held]
        self._stores: list[dict[str, Any]] = [store for _, store, _ in held]
        self._names = [name for _, _, name in held]
        self._values = [store[name] for _, store, name in held]
        self._joint = [*joint]
        self._joint_places = places_of(self._joint)

    def expect_unchanged(self) -> None:
        """Compare the model with its state at compilation.

        Raises:
            CompilationError: another module or tensor is in one of the places, or joint memory has
                moved.
        """
        if not all(self._same()):
            place = [*self._same()].index(False)
            path = ".".join(filter(None, (self._paths[place], self._names[place])))
            raise CompilationError(
                f"{path} of {self._kind} is another one than when it was compiled, as after "
                "load_state_dict(assign=True) or an adapter: compile it anew"
            )
        if places_of(self._joint) != self._joint_places:
            raise CompilationError(
                f"weights of {self._kind} that compiled code computes at once have moved in "
                "memory, as by .to() or .data: compile it anew"
            )

    def _same(self) -> Iterator[bool]:
        return map(operator.is_, map(dict.get, self._stores, self._names), self._values)


def _held_at(modules: Mapping[str, nn.Module], name: str) -> Any:
    path, _, attribute = name.rpartition(".")
    return getattr(modules.get(path), attribute, None)


def _is_packed(module: nn.Module) -> bool:
    return getattr(module, "_packed", None) is not None
