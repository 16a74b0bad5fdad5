"""Linear layers that share one storage, so that one kernel call computes them all.

The layers stay what they are: each keeps its own parameter objects, which become views of one tensor. Whoever reads,
trains, saves or ties them sees no difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from opgraft.compat.packed_linear import version_of
from opgraft.ops.composites.composite import Composite
from opgraft.ops.linear.modules import Linear
from torch import Tensor, nn
from torch.autograd.graph import increment_version

_PARAMETERS = ("weight", "bias")


@dataclass
class Joint:
    """One linear op over the storage of several.

    Attributes:
        op: the op; its outputs are those of the parts, one after another along the last dimension. Its parameters
            require no gradient, as it serves where none is required.
        parameters: of the parts, each with where it lies; ``op`` keeps that memory from being used for anything else.
        versions: of the parameters, how often ``op`` has seen each written to. The counter of its own parameters does
            not move when a part is written to, and kernels keep packed copies by it.
    """

    op: Linear
    parameters: list[tuple[nn.Parameter, int]]
    versions: list[int]

    def serves(self, parts: Sequence[nn.Module], x: Tensor) -> bool:
        """Whether one call of ``op`` on ``x`` is what calling the parts would be; it takes a microsecond or two."""
        expected, versions, gradient, kind = iter(self.parameters), [], x.requires_grad, type(self.op)
        for part in parts:
            if type(part) is not kind or part._forward_hooks or part._forward_pre_hooks or "forward" in part.__dict__:
                return False
            for parameter in part._parameters.values():
                if parameter is not None:
                    known, address = next(expected, (None, 0))
                    if parameter is not known or parameter.data_ptr() != address:
                        return False
                    versions.append(version_of(parameter))
                    gradient = gradient or parameter.requires_grad
        if next(expected, None) is not None or (gradient and torch.is_grad_enabled()):
            return False
        if versions != self.versions:
            increment_version(list(self.op.parameters()))
            self.versions = versions
        return True


class JointLayer(Composite):
    """A layer of which some linear children share one storage.

    They are put there by ``join``: on construction by ``graft``, after ``.to()``, loading, copying and unpickling.
    Anything else that separates them, such as assigning a parameter, makes the layer call them one by one. Parameters
    that are part of a larger storage, such as a flat buffer, are never taken out of it.
    """

    joined: tuple[str, ...] = ()
    """The names of the children that share one storage."""

    _moved: dict[str, set[int | None]]
    """Name of the parameter → where the storages begin into which this layer has moved those of its children."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["_joint"] = None
        self.__dict__["_moved"] = {}
        self.register_load_state_dict_post_hook(_join_loaded)  # type: ignore[no-untyped-call]

    def join(self) -> None:
        """Put the parameters of the joined children into one storage, where they fit together."""
        for name, homes in self._moved.items():
            homes &= self._homes(name)
        self.__dict__["_joint"] = None  # frees the former memory first
        self.__dict__["_joint"] = _join([self._modules[name] for name in self.joined], self._moved)

    def separate(self) -> None:
        """Give each joined child a storage of its own again, where ``join`` has moved it."""
        self.__dict__["_joint"] = None
        for name, homes in self._moved.items():
            for child in self.joined:
                parameter = self.get_submodule(child)._parameters.get(name)
                if parameter is not None and _home(parameter) in homes:
                    parameter.data = parameter.data.clone()
        self._moved.clear()

    def moved(self) -> frozenset[str]:
        """The names of the parameters that lie in a common storage which ``join`` has made."""
        return frozenset(
            f"{child}.{name}"
            for name, homes in self._moved.items()
            for child in self.joined
            if (parameter := self.get_submodule(child)._parameters.get(name)) is not None and _home(parameter) in homes
        )

    def _homes(self, name: str) -> set[int | None]:
        """Where the storages begin that hold the children's parameters of a name."""
        parameters = [self.get_submodule(child)._parameters.get(name) for child in self.joined]
        return {_home(parameter) for parameter in parameters if parameter is not None} - {None}

    def joint_op(self, x: Tensor) -> Linear | None:
        """The op that computes the joined children at once on ``x``, ``None`` where each must be called itself.

        That is while a compiler traces, where a gradient is required, where a child has hooks or was exchanged, and
        where the parameters lie in separate storages.
        """
        if torch.compiler.is_compiling():
            return None
        joint: Joint | None = self.__dict__["_joint"]
        if joint is None or type(x) is not Tensor:
            return None
        modules = self._modules
        return joint.op if joint.serves([modules[name] for name in self.joined], x) else None  # type: ignore[misc]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.__dict__["_joint"] = None
        applied = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.join()
        return applied

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_joint": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        # What was moved lies elsewhere now: pickle writes the common storage once for each of the parts.
        self.__dict__["_moved"] = {name: self._homes(name) for name, homes in state.get("_moved", {}).items() if homes}
        self.join()


def _join_loaded(layer: JointLayer, incompatible_keys: object) -> None:
    """After ``load_state_dict``, which with ``assign=True`` brings parameters of other storages."""
    layer.join()


def _join(parts: Sequence[Any], moved: dict[str, set[int | None]]) -> Joint | None:
    """The joint of the parts, which writes down in ``moved`` what it moves; ``None`` where they do not fit together."""
    if not all(_joinable(part, parts[0]) for part in parts) or len({id(part.weight) for part in parts}) < len(parts):
        return None
    together = {
        name: [part._parameters[name] for part in parts]
        for name in _PARAMETERS
        if parts[0]._parameters[name] is not None
    }
    if not all(_adjacent(tensors) or _movable(tensors, moved.get(name, set())) for name, tensors in together.items()):
        return None
    rows = [part.weight.shape[0] for part in parts]
    with torch.device("meta"):
        op = Linear(parts[0].weight.shape[1], sum(rows), bias=parts[0].bias is not None)
    if type(op) is not type(parts[0]):  # the parts were bound under other settings
        return None
    for name, tensors in together.items():
        with torch.inference_mode(False), torch.no_grad():
            if not _adjacent(tensors):
                moved[name] = {_move(tensors, rows)}
            op._parameters[name] = nn.Parameter(_spanning(tensors, sum(rows)), requires_grad=False)
    parameters = [parameter for part in parts for parameter in part._parameters.values() if parameter is not None]
    op.eval()
    return Joint(op, [(p, p.data_ptr()) for p in parameters], [version_of(p) for p in parameters])


def _move(tensors: Sequence[nn.Parameter], rows: Sequence[int]) -> int:
    """Make tensors views of one new one, along the first dimension, and say where its storage begins."""
    common = torch.cat([tensor.detach() for tensor in tensors])
    for tensor, part in zip(tensors, torch.split(common, list(rows)), strict=True):
        tensor.data = part
    return common.untyped_storage().data_ptr()


def _spanning(tensors: Sequence[nn.Parameter], rows: int) -> Tensor:
    """The one tensor over the memory of adjacent ones."""
    first = tensors[0].data  # not detach(), which would share the version counter
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def _movable(tensors: Sequence[Tensor], own: set[int | None]) -> bool:
    """Whether nobody else can have a part of the storages that hold the tensors; a join has made those in ``own``."""
    return all(t.untyped_storage().nbytes() <= t.nbytes or _home(t) in own for t in tensors)


def _home(tensor: Tensor) -> int | None:
    """Where the storage of a tensor begins, ``None`` where that is not plain memory."""
    if type(tensor) is not nn.Parameter or tensor.layout is not torch.strided or tensor.is_meta:
        return None
    return tensor.untyped_storage().data_ptr()


def _adjacent(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors lie one after another in one storage."""
    ends = [tensor.data_ptr() + tensor.nbytes for tensor in tensors]
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    return len(storages) == 1 and ends[:-1] == [tensor.data_ptr() for tensor in tensors[1:]]


def _joinable(part: Any, first: Any) -> bool:
    if not isinstance(part, Linear) or type(part) is not type(first) or part._parameters.keys() != set(_PARAMETERS):
        return False
    if (part.bias is None) != (first.bias is None) or part.weight.shape[1:] != first.weight.shape[1:]:
        return False
    return all(_plain(tensor, first.weight) for tensor in part.parameters(recurse=False))


def _plain(tensor: Tensor, like: Tensor) -> bool:
    """Whether a parameter is ordinary memory, of the dtype and device of ``like``, and its own to move."""
    if type(tensor) is not nn.Parameter or tensor.is_meta or tensor.is_inference() or not tensor.is_contiguous():
        return False
    # torch calls memory of accelerators shared, whoever holds it
    elsewhere = tensor.device.type == "cpu" and tensor.is_shared()  # type: ignore[no-untyped-call]
    return (tensor.dtype, tensor.device) == (like.dtype, like.device) and tensor.numel() > 0 and not elsewhere
