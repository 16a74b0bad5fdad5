"""The tensors of a graph by where a model has them, so that another process finds its own."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
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
    """Say of each tensor of a graph where the model has it."""
    modules: dict[str, Any] = modules_of(model)
    handles = {
        int(module._packed.handle): path for path, module in modules.items() if _is_packed(module)
    }
    found: dict[str, Origin] = {}
    for node in graph.graph.nodes:
        if node.op != "get_attr":
            continue
        tensor = attribute_of(graph, node)
        if JOINT in node.meta:
            found[str(node.target)] = node.meta[JOINT]
        elif _held(modules, str(node.target)) is tensor:
            found[str(node.target)] = ("model", str(node.target))
        elif any(
            user.target is torch.ops.opgraft.packed_only_linear.default for user in node.users
        ):
            found[str(node.target)] = ("packed", handles[int(tensor)])
        else:
            found[str(node.target)] = ("value",)
    return found


def tensors_of(
    model: nn.Module, origins: Mapping[str, Origin], values: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], tuple[nn.Parameter, ...]]:
    """Find the tensors of a graph in a model, and the parameters over whose memory joint ones lie.

    Args:
        model: which the graph computes.
        origins: as ``origins_of`` gives them.
        values: of those that are in no model.

    Raises:
        CacheEntryError: the model does not have one.
    """
    modules = modules_of(model)
    found: dict[str, Tensor] = {}
    parts: list[nn.Parameter] = []
    for name, (kind, *place) in origins.items():
        tensor = None
        if kind == "model":
            tensor = _held(modules, place[0])
        elif kind == "together":
            attribute, *paths = place
            parent = modules[paths[0].rpartition(".")[0]]
            # A layer that computes its children one by one needs another graph.
            if not isinstance(parent, JointLayer) or parent.computes_jointly():
                layers: list[Any] = [modules[path] for path in paths]
                tensor = (joint_parameters(layers) or {}).get(attribute)
                parts += [getattr(layer, attribute) for layer in layers]
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


def move_joint(parts: Iterable[Tensor]) -> None:
    """Have the memory that parameters were put into together moved to huge pages, after the first output."""
    move_to_huge_pages(
        (range(p.data_ptr(), p.data_ptr() + p.nbytes) for p in parts if p.is_cpu), wait=1.0
    )


class Places:
    """The modules of a model, and those of its parameters and buffers that a graph computes with, each at its place.

    Args:
        model: as it is now.
        used: the tensors of the graphs.
        joint: parameters over whose memory they have joint tensors, which must stay where it is.
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
        """Raise ``CompilationError`` where something else is in one of the places, or what is joint lies elsewhere."""
        if not all(self._same()):
            place = [*self._same()].index(False)
            path = ".".join(filter(None, (self._paths[place], self._names[place])))
            raise CompilationError(
                f"{path} of {self._kind} is another one than when it was compiled, as after "
                "load_state_dict(assign=True) or an adapter: compile it anew"
            )
        if places_of(self._joint) != self._joint_places:
            raise CompilationError(
                f"weights of {self._kind} that compiled code computes at once have moved in memory, as by .to() or "
                ".data: compile it anew"
            )

    def _same(self) -> Iterator[bool]:
        return map(operator.is_, map(dict.get, self._stores, self._names), self._values)


def _held(modules: Mapping[str, nn.Module], name: str) -> Any:
    path, _, attribute = name.rpartition(".")
    return getattr(modules.get(path), attribute, None)


def _is_packed(module: nn.Module) -> bool:
    return getattr(module, "_packed", None) is not None
