"""Linear layers with weights one after another in memory: one kernel call computes them all.

Each layer keeps its own parameter objects, in storages of their own. Code that reads, trains, saves
or ties the parameters sees no difference.
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
"""A contiguous parameter, and its address, shape and dtype. A write such as ``.data =`` may change
them."""

_NONE: Resident = (None, 0, torch.Size(), None)

_PARAMETERS = ("weight", "bias")

_TOGETHER: weakref.WeakValueDictionary[tuple[object, ...], nn.Parameter] = (
    weakref.WeakValueDictionary()
)
"""Joint parameters, by name and the ``id`` of the layers' own parameters."""


@dataclass
class Joint:
    """One linear op over the memory of several.

    Attributes:
        op: the op. The outputs of the parts follow one another along the last dimension. The
            parameters of the op require no gradient: the op serves calls without gradients only.
        blocks: name of a parameter → the memory that a join has made for the parts' parameters.
        parameters: the parts' parameters at the time of the join. ``op`` keeps their memory alive.
        versions: the count of writes to each parameter, as far as ``op`` knows. A write to a part
            does not count as a write to the parameters of ``op``, and kernels keep copies by that
            count.
        declarations: the ``freeze`` that declared each parameter frozen, as far as ``op`` knows.
    """

    op: Linear
    blocks: dict[str, Tensor]
    parameters: list[Resident]
    versions: list[int]
    declarations: list[int]

    def serves(self, parts: Sequence[nn.Module], x: Tensor) -> bool:
        """Return True if one call of ``op`` on ``x`` equals calls of the parts.

        The check runs with each call of the layer, and takes a microsecond or two.
        """
        kind = type(self.op)
        needs_gradient = x.requires_grad
        expected = iter(self.parameters)
        versions = []
        declarations = []

        for part in parts:
            if type(part) is not kind or "forward" in part.__dict__:
                return False
            if part._forward_hooks or part._forward_pre_hooks:
                return False
            for parameter in part._parameters.values():
                if parameter is None:
                    continue
                known, address, shape, dtype = next(expected, _NONE)
                if parameter is not known or parameter.data_ptr() != address:
                    return False
                if parameter.shape != shape or parameter.dtype is not dtype:
                    return False
                if not parameter.is_contiguous():
                    return False
                versions.append(version_of(parameter))
                declarations.append(declaration(parameter))
                needs_gradient = needs_gradient or parameter.requires_grad

        if next(expected, None) is not None or (needs_gradient and torch.is_grad_enabled()):
            return False

        if versions != self.versions or declarations != self.declarations:
            self._take_over(versions, declarations)
        return True

    def _take_over(self, versions: list[int], declarations: list[int]) -> None:
        """Pass writes to the parts, and declarations of weights, on to the parameters of ``op``."""
        if versions != self.versions:
            increment_version(list(self.op.parameters()))
            self.versions = versions
        if declarations == self.declarations:
            return

        # The blocks lie in the pages of the parts, so `freeze` has moved both.
        if all(declarations):
            declare_frozen(self.blocks.values())
        else:
            withdraw(self.blocks.values())
        self.declarations = declarations


class JointLayer(Composite):
    """A layer with linear children that have their weights one after another in memory.

    ``join`` puts the weights there: at construction by ``graft``, after ``.to()``, loading, copying
    and unpickling. After any other separation, such as a new parameter, the layer calls the
    children one by one. A parameter in a larger storage, such as a flat buffer, stays there.
    """

    joined: tuple[str, ...] = ()
    """The names of the children to compute at once."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["_joint"] = None
        self.register_load_state_dict_post_hook(_join_loaded)  # type: ignore[no-untyped-call]

    def join(self) -> None:
        """Put the parameters of the joined children one after another, if they fit together."""
        former = {}
        for name, block in self._blocks().items():
            if any(self._residents(name, block)):
                former[name] = block

        # Before the join, so that memory without a resident is free again.
        self.__dict__["_joint"] = None
        joint = _join_parts([self._modules[name] for name in self.joined], former)
        self.__dict__["_joint"] = joint
        kept = {} if joint is None else joint.blocks
        left = {name: block for name, block in former.items() if kept.get(name) is not block}
        self._move_out(left)

    def release_weights(self) -> None:
        """Move the parameters of the joined children back to memory of their own."""
        former = self._blocks()
        self.__dict__["_joint"] = None
        self._move_out(former)

    def process_weights_after_loading(self) -> None:
        self.join()

    def weights_in_common(self) -> frozenset[str]:
        names = set()
        for name, block in self._blocks().items():
            for child, _ in self._residents(name, block):
                names.add(f"{child}.{name}")
        return frozenset(names)

    def _blocks(self) -> dict[str, Tensor]:
        joint: Joint | None = self.__dict__["_joint"]
        return {} if joint is None else joint.blocks

    def _residents(self, name: str, block: Tensor) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each joined child with a parameter of that name in a block, and the parameter."""
        for child in self.joined:
            parameter = self.get_submodule(child)._parameters.get(name)
            if parameter is not None and _lies_in(parameter, block):
                yield child, parameter

    def _move_out(self, blocks: dict[str, Tensor]) -> None:
        """Move all parameters out of blocks, so that the blocks' memory is free."""
        for name, block in blocks.items():
            for _, parameter in self._residents(name, block):
                parameter.data = parameter.data.clone()

    def joint_op(self, x: Tensor) -> Linear | None:
        """Return the op for the joined children at once on ``x``, or ``None``.

        ``None`` stands for a call of each child: a compiler traces, a gradient is required, a child
        has hooks or was exchanged, or parameters lie apart.
        """
        if torch.compiler.is_compiling():
            return None

        joint: Joint | None = self.__dict__["_joint"]
        if joint is None or type(x) is not Tensor or x.is_nested or hooks_on_every_module():
            return None

        modules: dict[str, Any] = self._modules
        parts = [modules[name] for name in self.joined]
        return joint.op if joint.serves(parts, x) else None

    def computes_jointly(self) -> bool:
        """Return True if one op computes the joined children, for inputs without a gradient."""
        first: Any = self._modules[self.joined[0]]
        weight = first.weight
        probe = torch.empty(1, weight.shape[1], dtype=weight.dtype, device=weight.device)
        return self.joint_op(probe) is not None

    def computed_at_once(self) -> tuple[str, ...]:
        """Return the names of the children of one op, if no gradient is required."""
        return self.joined if self.fits() else ()

    def fits(self) -> bool:
        """Return True if the joined children are computed at once, or will be after ``join``."""
        if self.__dict__["_joint"] is not None:
            return True
        together = _to_join([self._modules[name] for name in self.joined])
        if together is None:
            return False
        return all(_can_lie_together(tensors) for tensors in together.values())

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

    The same layers have the same joint parameters as long as somebody holds them; the children of a
    ``JointLayer`` have the parameters of the layer's op. Frozen weights stay frozen. New blocks lie
    in small pages: call ``move_to_huge_pages`` once for many.

    Returns:
        Parameters over the memory of all parts, by name; ``None`` if the parts do not fit.
    """
    together = _to_join(parts)
    if together is None:
        return None

    own = list(itertools.chain(*together.values()))
    are_frozen = all(map(declaration, own))
    keys = {name: _key(name, tensors) for name, tensors in together.items()}
    former = {name: _TOGETHER[key] for name, key in keys.items() if key in _TOGETHER}

    holder: Any = nn.Module()
    with torch.inference_mode(False), torch.no_grad():
        blocks = _bring_together(together, former, holder, huge=False)
    if blocks is None:
        return None

    joint = {}
    for name, key in keys.items():
        is_unmoved = name in former and blocks.get(name) is former[name]
        joint[name] = former[name] if is_unmoved else holder._parameters[name]
        _TOGETHER[key] = joint[name]

    # A second declaration would make kernels copy their weights again.
    if are_frozen and not all(map(declaration, joint.values())):
        declare_frozen([*own, *joint.values()])
    return joint


def _key(name: str, tensors: Sequence[nn.Parameter]) -> tuple[object, ...]:
    return (name, *map(id, tensors))


def _to_join(parts: Sequence[Any]) -> dict[str, list[nn.Parameter]] | None:
    """Return the parameters of linear layers by name; ``None`` if the layers cannot be joined."""
    first = parts[0]
    if not all(_can_join(part, first) for part in parts):
        return None

    together = {}
    for name in _PARAMETERS:
        if first._parameters[name] is None:
            continue
        tensors = [part._parameters[name] for part in parts]
        # A tied parameter cannot have two places.
        if len(set(map(id, tensors))) < len(tensors):
            return None
        together[name] = tensors
    return together


def _join_loaded(layer: JointLayer, incompatible_keys: object) -> None:
    """Join after ``load_state_dict``: with ``assign=True``, new parameters have other storages."""
    layer.join()


def _join_parts(parts: Sequence[Any], former: dict[str, Tensor]) -> Joint | None:
    """Join the parts, in the ``former`` blocks if possible; ``None`` if the parts do not fit."""
    together = _to_join(parts)
    if together is None:
        return None

    columns = parts[0].weight.shape[1]
    rows = sum(part.weight.shape[0] for part in parts)
    # Parameters over the parts' memory replace those on meta.
    with torch.device("meta"):
        op = Linear(columns, rows, bias="bias" in together)

    # The parts may have been bound under other settings.
    if type(op) is not type(parts[0]):
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
    """Bring parameters together, and give ``op`` parameters over their memory.

    Args:
        together: the parameters of the parts, by name.
        former: blocks of an earlier join, by name.
        op: a module for the joint parameters.
        huge: put new blocks in huge pages. Ordinary memory is sooner written to.

    Returns:
        The blocks with the parameters, by name; ``None`` if one of them cannot move. Adjacent
        parameters of a user's storage need no block.
    """
    blocks: dict[str, Tensor] = {}
    moves: list[tuple[nn.Parameter, Tensor]] = []
    for name, tensors in together.items():
        found = _spanning_tensor(tensors, former.get(name))
        if found is None:
            copied = _copy_to_block(tensors, huge)
            if copied is None:
                return None
            found, places = copied
            blocks[name] = found
            moves += zip(tensors, places, strict=True)
        elif found is former.get(name):
            blocks[name] = found
        op._parameters[name] = nn.Parameter(found, requires_grad=False)

    # Last, where nothing can fail any more: either all parameters move or none does.
    for tensor, place in moves:
        tensor.data = place
    return blocks


def _copy_to_block(
    tensors: Sequence[nn.Parameter], huge: bool
) -> tuple[Tensor, list[Tensor]] | None:
    """Copy the values of several tensors to one new block.

    Returns:
        The block, and a tensor over each one's place in the block. ``None`` if another tensor may
        lie in the same storage as one of them, or if the device cannot share memory.
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
        # A storage for each: savers of models take tensors of one storage for tied weights.
        return block, [from_dlpack(part) for part in parts]
    except (BufferError, RuntimeError, TypeError, ValueError):
        return None


def _spanning_tensor(tensors: Sequence[nn.Parameter], block: Tensor | None) -> Tensor | None:
    """Return one tensor over the memory of adjacent ones, or ``None``.

    The result is ``block`` if the tensors fill it, or else a view of their common storage.
    """
    if not _are_adjacent(tensors):
        return None

    first = tensors[0].data_ptr()
    end = _end(tensors[-1])
    if block is not None and block.data_ptr() == first and _end(block) == end:
        return block if block.dtype == tensors[0].dtype else None

    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    if len(storages) > 1:
        return None

    # Not detach(): that would share the version counter.
    source = tensors[0].data
    shape = (sum(map(len, tensors)), *source.shape[1:])
    return source.as_strided(shape, source.stride(), source.storage_offset())


def _end(tensor: Tensor) -> int:
    """Return the address behind a contiguous tensor."""
    return tensor.data_ptr() + tensor.nbytes


def _are_adjacent(tensors: Sequence[Tensor]) -> bool:
    """Return True if contiguous tensors lie one after another, without gaps."""
    return all(_end(tensor) == after.data_ptr() for tensor, after in itertools.pairwise(tensors))


def _lies_in(tensor: Tensor, block: Tensor) -> bool:
    if type(tensor) is not nn.Parameter or tensor.layout is not torch.strided:
        return False
    if tensor.device != block.device:
        return False
    return block.data_ptr() <= tensor.data_ptr() < _end(block)


def _can_join(part: Any, first: Any) -> bool:
    """Return True if a layer can be joined with the first of several."""
    if not isinstance(part, Linear) or type(part) is not type(first):
        return False
    if part._parameters.keys() != set(_PARAMETERS):
        return False
    if (part.bias is None) != (first.bias is None):
        return False
    if part.weight.shape[1:] != first.weight.shape[1:]:
        return False
    return all(_can_move(tensor, first.weight) for tensor in part.parameters(recurse=False))


def _can_move(tensor: Tensor, like: Tensor) -> bool:
    """Return True if a parameter may get new memory, and has the dtype and device of ``like``."""
    if type(tensor) is not nn.Parameter or tensor.is_meta or tensor.is_inference():
        return False
    if not tensor.is_contiguous() or not tensor.numel():
        return False

    # Torch reports all memory of accelerators as shared.
    is_shared = tensor.device.type == "cpu" and tensor.is_shared()  # type: ignore[no-untyped-call]
    if is_shared:
        return False
    return tensor.dtype == like.dtype and tensor.device == like.device


def _can_lie_together(tensors: Sequence[Tensor]) -> bool:
    """Return True if tensors are adjacent, or if no other tensor can lie in their storages."""
    if _are_adjacent(tensors):
        return True
    return all(tensor.untyped_storage().nbytes() <= tensor.nbytes for tensor in tensors)
