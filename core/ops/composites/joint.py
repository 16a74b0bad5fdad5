"""Linear layers whose weights lie one after another in memory, so that one kernel call computes them all.

The layers stay what they are: each keeps its own parameter objects, in storages of their own. Whoever reads, trains,
saves or ties them sees no difference.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from opgraft.compat.hooks import hooks_on_every_module
from opgraft.compat.packed_linear import version_of
from opgraft.machine.memory import expect_huge_pages
from opgraft.ops.composites.composite import Composite
from opgraft.ops.linear.modules import Linear
from opgraft.ops.linear.weight_cache import declaration, declare_frozen, withdraw
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils.dlpack import from_dlpack

Resident: TypeAlias = tuple[nn.Parameter | None, int, torch.Size, torch.dtype | None]
"""A contiguous parameter, with what writes such as ``.data = `` may change of it: its address, shape and dtype."""

_NONE: Resident = (None, 0, torch.Size(), None)

_PARAMETERS = ("weight", "bias")

_TOGETHER: weakref.WeakValueDictionary[tuple[object, ...], nn.Parameter] = (
    weakref.WeakValueDictionary()
)
"""Joint parameters, by name and the ``id`` of the parameters of the layers."""


@dataclass
class Joint:
    """One linear op over the memory of several.

    Attributes:
        op: the op; its outputs are those of the parts, one after another along the last dimension. Its parameters
            require no gradient, as it serves where none is required.
        blocks: name of the parameter → the memory that a join has made for those of the parts.
        parameters: of the parts, each as it lay; ``op`` keeps that memory from being used for anything else.
        versions: of the parameters, how often ``op`` has seen each written to. The counter of its own parameters does
            not move when a part is written to, and kernels keep copies by it.
        declarations: of the parameters, by which ``freeze`` each was declared frozen, as far as ``op`` knows.
    """

    op: Linear
    blocks: dict[str, Tensor]
    parameters: list[Resident]
    versions: list[int]
    declarations: list[int]

    def serves(self, parts: Sequence[nn.Module], x: Tensor) -> bool:
        """Tell whether one call of ``op`` on ``x`` equals calling the parts; it takes a microsecond or two."""
        expected, versions, declarations = iter(self.parameters), [], []
        gradient, kind = x.requires_grad, type(self.op)
        for part in parts:
            if (
                type(part) is not kind
                or part._forward_hooks
                or part._forward_pre_hooks
                or "forward" in part.__dict__
            ):
                return False
            for parameter in part._parameters.values():
                if parameter is not None:
                    known, address, shape, dtype = next(expected, _NONE)
                    if (
                        parameter is not known
                        or parameter.data_ptr() != address
                        or parameter.shape != shape
                    ):
                        return False
                    if not parameter.is_contiguous() or parameter.dtype is not dtype:
                        return False
                    versions.append(version_of(parameter))
                    declarations.append(declaration(parameter))
                    gradient = gradient or parameter.requires_grad
        if next(expected, None) is not None or (gradient and torch.is_grad_enabled()):
            return False
        if versions != self.versions:
            increment_version(list(self.op.parameters()))
            self.versions = versions
        if declarations != self.declarations:
            if all(declarations):  # in pages that they were moved to with the parts
                declare_frozen(self.blocks.values())
            else:
                withdraw(self.blocks.values())
            self.declarations = declarations
        return True


class JointLayer(Composite):
    """A layer of which some linear children have their weights one after another in memory.

    They are put there by ``join``: on construction by ``graft``, after ``.to()``, loading, copying and unpickling.
    Anything else that separates them, such as assigning a parameter, makes the layer call them one by one. Parameters
    that are part of a larger storage, such as a flat buffer, are never taken out of it.
    """

    joined: tuple[str, ...] = ()
    """The names of the children that are computed at once."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["_joint"] = None
        self.register_load_state_dict_post_hook(_join_loaded)  # type: ignore[no-untyped-call]

    def join(self) -> None:
        """Put the parameters of the joined children one after another, where they fit together."""
        former = {
            name: block
            for name, block in self._blocks().items()
            if any(self._residents(name, block))
        }
        self.__dict__["_joint"] = None  # frees the former memory first
        joint = self.__dict__["_joint"] = _join_parts(
            [self._modules[name] for name in self.joined], former
        )
        kept = joint.blocks if joint is not None else {}
        self._leave({name: block for name, block in former.items() if kept.get(name) is not block})

    def release_weights(self) -> None:
        """Give each joined child memory of its own again, where ``join`` has moved it."""
        former = self._blocks()
        self.__dict__["_joint"] = None
        self._leave(former)

    def process_weights_after_loading(self) -> None:
        self.join()

    def weights_in_common(self) -> frozenset[str]:
        return frozenset(
            f"{child}.{name}"
            for name, block in self._blocks().items()
            for child, _ in self._residents(name, block)
        )

    def _blocks(self) -> dict[str, Tensor]:
        joint: Joint | None = self.__dict__["_joint"]
        return {} if joint is None else joint.blocks

    def _residents(self, name: str, block: Tensor) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the joined children whose parameter of a name lies in a block, each with the parameter."""
        for child in self.joined:
            parameter = self.get_submodule(child)._parameters.get(name)
            if parameter is not None and _lies_in(parameter, block):
                yield child, parameter

    def _leave(self, blocks: dict[str, Tensor]) -> None:
        """Move out of blocks what lies in them, so that they take no memory."""
        for name, block in blocks.items():
            for _, parameter in self._residents(name, block):
                parameter.data = parameter.data.clone()

    def joint_op(self, x: Tensor) -> Linear | None:
        """Return the op that computes the joined children at once on ``x``, ``None`` where each must be called itself.

        That is while a compiler traces, where a gradient is required, where a child has hooks or was exchanged, and
        where the parameters lie in separate storages.
        """
        if torch.compiler.is_compiling():
            return None
        joint: Joint | None = self.__dict__["_joint"]
        if joint is None or type(x) is not Tensor or x.is_nested or hooks_on_every_module():
            return None
        modules = self._modules
        return joint.op if joint.serves([modules[name] for name in self.joined], x) else None  # type: ignore[misc]

    def computes_jointly(self) -> bool:
        """Return True if one op computes the joined children for inputs without a gradient."""
        first: Any = self._modules[self.joined[0]]
        weight = first.weight
        probe = torch.empty(1, weight.shape[1], dtype=weight.dtype, device=weight.device)
        return self.joint_op(probe) is not None

    def computed_at_once(self) -> tuple[str, ...]:
        """Return the names of the children that one op computes, if no gradient is required."""
        return self.joined if self.fits() else ()

    def fits(self) -> bool:
        """Return True if the joined children are computed at once, or will be after ``join``."""
        if self.__dict__["_joint"] is not None:
            return True
        together = _to_join([self._modules[name] for name in self.joined])
        return together is not None and all(map(_can_lie_together, together.values()))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        applied = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.join()
        return applied

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_joint": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.join()


def joint_parameters(parts: Sequence[nn.Module]) -> dict[str, nn.Parameter] | None:
    """Put the weights of linear layers one after another in memory.

    The same layers have the same joint parameters for as long as somebody holds these, and the joint
    parameters of the children of a ``JointLayer`` are those of the layer's op. Frozen weights stay
    frozen. New blocks lie in small pages: call ``move_to_huge_pages`` once for many.

    Returns:
        The parameters over the memory of all parts, by name; ``None`` if the parts do not fit.
    """
    together = _to_join(parts)
    if together is None:
        return None
    keys = {name: _key(name, tensors) for name, tensors in together.items()}
    former = {name: _TOGETHER[key] for name, key in keys.items() if key in _TOGETHER}
    frozen = all(declaration(tensor) for tensors in together.values() for tensor in tensors)
    holder: Any = nn.Module()
    with torch.inference_mode(False), torch.no_grad():
        blocks = _bring_together(together, former, holder, huge=False)
    if blocks is None:
        return None
    joint = {}
    for name, key in keys.items():
        unmoved = name in former and blocks.get(name) is former[name]
        joint[name] = former[name] if unmoved else holder._parameters[name]
        _TOGETHER[key] = joint[name]
    # A second declaration would make kernels copy their weights again.
    if frozen and not all(map(declaration, joint.values())):
        declare_frozen(itertools.chain(*together.values(), joint.values()))
    return joint


def _key(name: str, tensors: Sequence[nn.Parameter]) -> tuple[object, ...]:
    return name, *map(id, tensors)


def _to_join(parts: Sequence[Any]) -> dict[str, list[nn.Parameter]] | None:
    """Return the parameters of linear layers by name; ``None`` if the layers cannot be joined."""
    first = parts[0]
    if not all(_joinable(part, first) for part in parts):
        return None
    together = {}
    for name in _PARAMETERS:
        if first._parameters[name] is None:
            continue
        tensors = [part._parameters[name] for part in parts]
        if len(set(map(id, tensors))) < len(tensors):
            return None
        together[name] = tensors
    return together


def _join_loaded(layer: JointLayer, incompatible_keys: object) -> None:
    """Join after ``load_state_dict``, which with ``assign=True`` brings parameters of other storages."""
    layer.join()


def _join_parts(parts: Sequence[Any], former: dict[str, Tensor]) -> Joint | None:
    """Join the parts, in the ``former`` blocks if the parts lie there; ``None`` if they do not fit."""
    together = _to_join(parts)
    if together is None:
        return None
    rows = [part.weight.shape[0] for part in parts]
    with torch.device("meta"):  # its parameters are exchanged below
        op = Linear(parts[0].weight.shape[1], sum(rows), bias="bias" in together)
    if type(op) is not type(parts[0]):  # the parts were bound under other settings
        return None
    # Tensors made in inference mode count no writes, and kernels keep copies by these counts.
    with torch.inference_mode(False), torch.no_grad():
        blocks = _bring_together(together, former, op)
    if blocks is None:
        return None
    for name, tensors in together.items():
        joint: Any = op._parameters[name]
        _TOGETHER[_key(name, tensors)] = joint
    # In the order in which ``serves`` walks over the parts.
    parameters = [p for part in parts for p in part.parameters(recurse=False)]
    residents: list[Resident] = [(p, p.data_ptr(), p.shape, p.dtype) for p in parameters]
    versions = [version_of(p) for p in parameters]
    return Joint(op.eval(), blocks, residents, versions, [0] * len(parameters))


def _bring_together(
    together: Mapping[str, Sequence[nn.Parameter]],
    former: Mapping[str, Tensor],
    op: nn.Module,
    huge: bool = True,
) -> dict[str, Tensor] | None:
    """Bring parameters together, give ``op`` what spans them, and say in which blocks; ``None`` where that fails.

    New blocks are in ``huge`` pages, or in whatever memory is there, which is sooner written to.
    """
    blocks: dict[str, Tensor] = {}
    moves: list[tuple[nn.Parameter, Tensor]] = []
    for name, tensors in together.items():
        found = _spanning(tensors, former.get(name))
        if found is None:
            placed = _place(tensors, huge)
            if placed is None:
                return None
            found = blocks[name] = placed[0]
            moves += zip(tensors, placed[1], strict=True)
        elif found is former.get(name):
            blocks[name] = found
        op._parameters[name] = nn.Parameter(found, requires_grad=False)
    # Last, where nothing can fail any more: either all parameters move or none does.
    for tensor, place in moves:
        tensor.data = place
    return blocks


def _place(tensors: Sequence[nn.Parameter], huge: bool) -> tuple[Tensor, list[Tensor]] | None:
    """Copy the values of several tensors to one new block; return it and each one's place in it, as a tensor.

    Storages of their own, because those who save a model take tensors that share one for tied weights. ``None`` where
    somebody else may have a part of a tensor's storage, or the device cannot share memory.
    """
    if any(tensor.untyped_storage().nbytes() > tensor.nbytes for tensor in tensors):
        return None
    first = tensors[0]
    block = first.new_empty((sum(map(len, tensors)), *first.shape[1:]))
    if huge and block.is_cpu:
        expect_huge_pages([range(block.data_ptr(), block.data_ptr() + block.nbytes)])
    torch.cat([tensor.detach() for tensor in tensors], out=block)
    parts = torch.split(block, [tensor.shape[0] for tensor in tensors])
    try:
        # A storage of its own each, over the block's memory.
        return block, [from_dlpack(part) for part in parts]
    except (BufferError, RuntimeError, TypeError, ValueError):
        return None


def _spanning(tensors: Sequence[nn.Parameter], block: Tensor | None) -> Tensor | None:
    """Return one tensor over the memory of adjacent ones: ``block``, or a view where they lie in one storage."""
    ends = [tensor.data_ptr() + tensor.nbytes for tensor in tensors]
    if ends[:-1] != [tensor.data_ptr() for tensor in tensors[1:]]:
        return None
    if block is not None and (block.data_ptr(), block.data_ptr() + block.nbytes) == (
        tensors[0].data_ptr(),
        ends[-1],
    ):
        return block if block.dtype == tensors[0].dtype else None
    if len({tensor.untyped_storage().data_ptr() for tensor in tensors}) > 1:
        return None
    first = tensors[0].data  # not detach(), which would share the version counter
    return first.as_strided(
        (sum(map(len, tensors)), *first.shape[1:]), first.stride(), first.storage_offset()
    )


def _lies_in(tensor: Tensor, block: Tensor) -> bool:
    if (
        type(tensor) is not nn.Parameter
        or tensor.layout is not torch.strided
        or tensor.device != block.device
    ):
        return False
    return block.data_ptr() <= tensor.data_ptr() < block.data_ptr() + block.nbytes


def _joinable(part: Any, first: Any) -> bool:
    if (
        not isinstance(part, Linear)
        or type(part) is not type(first)
        or part._parameters.keys() != set(_PARAMETERS)
    ):
        return False
    if (part.bias is None) != (first.bias is None) or part.weight.shape[1:] != first.weight.shape[
        1:
    ]:
        return False
    return all(_is_plain_like(tensor, first.weight) for tensor in part.parameters(recurse=False))


def _is_plain_like(tensor: Tensor, like: Tensor) -> bool:
    """Tell whether a parameter is ordinary memory, of the dtype and device of ``like``, and its own to move."""
    if (
        type(tensor) is not nn.Parameter
        or tensor.is_meta
        or tensor.is_inference()
        or not tensor.is_contiguous()
    ):
        return False
    # torch calls memory of accelerators shared, whoever holds it
    elsewhere = tensor.device.type == "cpu" and tensor.is_shared()  # type: ignore[no-untyped-call]
    return (
        (tensor.dtype, tensor.device) == (like.dtype, like.device)
        and tensor.numel() > 0
        and not elsewhere
    )


def _can_lie_together(tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors lie one after another, or nobody else can have a part of their storages."""
    ends = [tensor.data_ptr() + tensor.nbytes for tensor in tensors]
    adjacent = ends[:-1] == [tensor.data_ptr() for tensor in tensors[1:]]
    return adjacent or all(tensor.untyped_storage().nbytes() <= tensor.nbytes for tensor in tensors)
