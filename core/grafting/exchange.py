"""Build an op around the tensors of a module, exchange the two, and give the tensors back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from inspect import isdatadescriptor, isroutine
from typing import Any

import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.errors import GraftError, PackError
from opgraft.ops.freezing import restore_linear_layers
from opgraft.ops.linear.transposed import TransposedLinear
from opgraft.ops.weights import ReleasesWeights, call_post_load_hook, has_post_load_hook
from opgraft.registry.adapter import LeaveAlone
from torch import Tensor, nn
from torch.nn.utils import parametrize

_KEPT = "_opgraft_original"
_REGISTRIES = ("_parameters", "_buffers")
_SETTING = (int, float, str, type(None))
_PLAIN = (nn.Parameter, type(None))


@dataclass(frozen=True)
class SharedStore:
    """One dictionary of parameters or buffers, common to a module and an op.

    Attributes:
        path: of the part, below the op and below the module.
        owner: the part of the module.
        registry: the attribute with the dictionary.
        names: the names in the dictionary of the module → True for a tensor, False for ``None``.
    """

    path: str
    owner: nn.Module
    registry: str
    names: Mapping[str, bool]

    def tensors(self) -> list[str]:
        """Return the full names of the tensors."""
        return [joined_path(self.path, name) for name, present in self.names.items() if present]


@dataclass(frozen=True)
class Original:
    """The module that an op stands for. No submodule of the op, as tensors would be listed twice.

    The module and the op share their dictionaries of parameters and buffers. So a weight that is
    exchanged in the op is not kept alive here, and other code that holds the module computes with
    the tensors of the op.

    Attributes:
        module: the module.
        shared: the common dictionaries.
        attributes: public attributes of the module, with the values of the op at the exchange.
    """

    module: nn.Module
    shared: tuple[SharedStore, ...]
    attributes: Mapping[str, Any]


def build_op(
    op_class: type[nn.Module], arguments: Mapping[str, Any], module: nn.Module, device: torch.device
) -> nn.Module:
    """Construct an op with the tensors, children, training flag and public attributes of a module.

    The module is not changed. The op is constructed without memory first. An op with tensors of its
    own is constructed again on the device of the module's tensors, or on ``device``.

    Raises:
        LeaveAlone: the op has other parameters than the module, or cannot give the parameters back.
    """
    op = _constructed(op_class, arguments, module, torch.device("meta"))
    if has_post_load_hook(op) and not isinstance(op, ReleasesWeights):
        raise LeaveAlone(
            f"{type(op).__qualname__} defines process_weights_after_loading, and no "
            "release_weights that takes it back"
        )

    own_device = next((tensor.device for tensor in _tensors(module).values()), device)
    # A tensor that the op computes, such as a table of cosines, needs memory.
    if own_device.type != "meta" and any(tensor.is_meta for tensor in _all_tensors(op)):
        op = _constructed(op_class, arguments, module, own_device)

    # Children that the op shares with the module keep their own flags.
    for part in set(op.modules()) - set(module.modules()):
        part.training = module.training

    _take_children(op, module)
    _copy_attributes(op, module)
    return op


def install(op: nn.Module, module: nn.Module, path: str) -> None:
    """Let an op of ``build_op`` share the tensors of the module at ``path``, and keep the module.

    Raises:
        WeightError: the op has a hook for loaded weights, and the hook raised.
    """
    # ``put_back`` compares: only settings that were written to later go back to the module.
    public = _public_attributes(module)
    attributes = {name: getattr(op, name, value) for name, value in public.items()}
    op.__dict__[_KEPT] = Original(module, tuple(_share(op, module)), attributes)
    if isinstance(op, TransposedLinear):
        # PEFT looks for transformers' Conv1D by class.
        op._stand_for(type(module))
    if has_post_load_hook(op):
        call_post_load_hook(path, op)


def original_of(module: nn.Module) -> nn.Module | None:
    """Return the module that an op stands for; ``None`` for any other module."""
    kept = module.__dict__.get(_KEPT)
    return kept.module if isinstance(kept, Original) else None


def check_restorable(op: nn.Module) -> None:
    """Raise ``GraftError`` if the module cannot take over a change of the op by other code."""
    # ``put_back`` reports the parameters that a parametrization has taken away.
    if original_of(op) is None or parametrize.is_parametrized(op):
        return

    name = op.op_class.__name__ if isinstance(op, CustomOp) else type(op).__name__
    if isinstance(op, CustomOp) and type(op) is not op.bound_class:
        raise GraftError(
            f"{name} was given the class {type(op).__name__} by other code, such as fully_shard, "
            "which stays with the op: take that back first, or ungraft before it"
        )
    if not op._forward_hooks and not op._forward_pre_hooks:
        return

    for key, parameter in op._parameters.items():
        if type(parameter) not in _PLAIN:
            raise GraftError(
                f"the {key} is a {type(parameter).__name__} of {name}, whose hooks stay with the "
                "op: it was parallelized while grafted, as by parallelize_module. Ungraft before "
                "that"
            )


def _follow_training(op: nn.Module, original: nn.Module) -> None:
    """Set the training flag of the op in the modules that only the original has."""
    for part in set(original.modules()) - set(op.modules()):
        part.training = op.training


def _expect_all_tensors(op: nn.Module, kept: Original, held: Mapping[str, Tensor]) -> None:
    """Check that an op has all tensors of its module.

    Raises:
        GraftError: the op lacks a tensor.
    """
    wanted = {name for row in kept.shared for name in row.tensors()}
    lost = sorted(wanted - held.keys())
    if lost:
        raise GraftError(
            f"{type(op).__name__} no longer has {', '.join(lost)} of the "
            f"{type(kept.module).__name__} in whose place it stands: take back what changed it, "
            "such as a parametrization, before ungrafting"
        )


def put_back(op: nn.Module, sharing: bool = False) -> nn.Module:
    """Return the module that an op stands for, with the op's tensors and changed settings.

    Weights are plain, and the training flag is that of the op. Any other module is returned
    unchanged.

    Args:
        op: the op.
        sharing: let the module keep the common dictionaries, if they have the same names. Code that
            shards parameters knows the op, and exchanges the parameters there.

    Raises:
        GraftError: the op lacks a tensor of the module, or packed weights cannot be put back.
    """
    kept = op.__dict__.get(_KEPT)
    if not isinstance(kept, Original):
        return op

    _make_plain(op)
    if isinstance(op, ReleasesWeights):
        op.release_weights()

    original = kept.module
    held = _tensors(op)
    _expect_all_tensors(op, kept, held)
    for row in kept.shared:
        tensors = getattr(row.owner, row.registry)
        present = {name: tensor is not None for name, tensor in tensors.items()}
        if sharing and present == row.names:
            continue
        # A module that was shared until now gets dictionaries of its own.
        own: dict[str, Tensor | None] = dict.fromkeys(row.names)
        for name, is_tensor in row.names.items():
            if is_tensor:
                own[name] = held[joined_path(row.path, name)]
        row.owner.__dict__[row.registry] = own

    _put_settings_back(op, original, kept.attributes)

    _follow_training(op, original)
    del op.__dict__[_KEPT]
    return original


def _put_settings_back(op: nn.Module, original: nn.Module, attributes: Mapping[str, Any]) -> None:
    """Give a module the numbers and strings from changed attributes of the op."""
    for name, before in attributes.items():
        now = getattr(op, name, before)
        if isinstance(now, _SETTING) and isinstance(before, _SETTING) and now != before:
            setattr(original, name, now)


def _make_plain(op: nn.Module) -> None:
    try:
        restore_linear_layers(op)
    except PackError as error:
        raise GraftError(f"{type(op).__name__}: {error}") from error


def _take_children(op: nn.Module, module: nn.Module) -> None:
    """Give an op the children of the module, except where the op has a child of another class.

    Hooks on these children outlive ``graft`` and ``ungraft``, and so do references of other code.
    The children keep the order of the module, because optimizers number parameters by that order.
    """
    own = dict(op._modules)
    op._modules.clear()
    for name, child in module._modules.items():
        # The op would construct a child of the same class itself.
        mine = own.pop(name, child)
        op._modules[name] = child if type(mine) is type(child) else mine
    op._modules.update(own)


def _copy_attributes(op: nn.Module, module: nn.Module) -> None:
    """Give an op the public attributes of the module that the op lacks."""
    present = set(dir(op))
    for name, value in _public_attributes(module).items():
        if name not in present:
            op.__dict__[name] = value


def _public_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the public attributes of a module and its classes, without methods and properties."""
    values: dict[str, Any] = {}
    for cls in reversed(type(module).__mro__):
        if cls in nn.Module.__mro__:
            continue
        for name, value in vars(cls).items():
            if not isroutine(value) and not isdatadescriptor(value):
                values[name] = value

    values |= vars(module)
    private = {name for name in values if name.startswith("_")} | {"training"}
    return {name: value for name, value in values.items() if name not in private}


def _share(op: nn.Module, module: nn.Module) -> Iterator[SharedStore]:
    """Make the module's dictionaries of tensors the op's too, with the op's own tensors added."""
    parts = dict(op.named_modules(remove_duplicate=False))
    for path, owner in module.named_modules():
        if path not in parts:
            continue
        part = parts[path]
        for registry in _REGISTRIES:
            tensors = getattr(owner, registry)
            names = {name: tensor is not None for name, tensor in tensors.items()}
            if not any(names.values()):
                continue
            yield SharedStore(path, owner, registry, names)
            # Both sides must leave the same buffers out of a state_dict.
            owner._non_persistent_buffers_set |= part._non_persistent_buffers_set
            part._non_persistent_buffers_set = owner._non_persistent_buffers_set
            # A ``None`` of the module would hide a tensor of the op.
            own = {**part._parameters, **part._buffers}
            for name, present in names.items():
                if not present and own.get(name) is not None:
                    del tensors[name]
            for name, tensor in getattr(part, registry).items():
                if tensors.get(name) is None:
                    tensors[name] = tensor
            part.__dict__[registry] = tensors


def joined_path(path: str, name: str) -> str:
    """Return the path of a child or tensor below a path."""
    return f"{path}.{name}".lstrip(".")


def _constructed(
    op_class: type[nn.Module], arguments: Mapping[str, Any], module: nn.Module, device: torch.device
) -> nn.Module:
    # Tensors of the op are replaced below, so on "meta" they take no memory.
    with device:
        op = op_class(**arguments)
    _check_fit(op, module)
    _put(op, _tensors(module))
    return op


def _check_fit(op: nn.Module, module: nn.Module) -> None:
    ours = _persistent(op)
    theirs = _persistent(module)
    kind = type(op).__name__
    if ours.keys() != theirs.keys():
        differing = ", ".join(sorted(ours.keys() ^ theirs.keys()))
        raise LeaveAlone(f"{kind} does not have the same parameters: they differ in {differing}")

    for name, tensor in theirs.items():
        shape = ours[name].shape
        if shape != tensor.shape:
            shapes = f"{tuple(shape)} instead of {tuple(tensor.shape)}"
            raise LeaveAlone(f"{kind} has {name} of shape {shapes}")


def _persistent(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's tensors in a checkpoint, without calling hooks."""
    transient: set[str] = set()
    for path, owner in module.named_modules(remove_duplicate=False):
        transient.update(joined_path(path, name) for name in owner._non_persistent_buffers_set)
    return {name: tensor for name, tensor in _tensors(module).items() if name not in transient}


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(module.named_buffers(remove_duplicate=False))}


def _all_tensors(op: nn.Module) -> Iterator[Tensor]:
    """Yield parameters, buffers and tensors among plain attributes."""
    yield from _tensors(op).values()
    for part in op.modules():
        yield from (value for value in vars(part).values() if isinstance(value, Tensor))


def _put(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Replace the parameters and buffers of a module by the tensors of the same names."""
    for path, owner in module.named_modules(remove_duplicate=False):
        for registry in (owner._parameters, owner._buffers):
            for name, present in registry.items():
                if present is not None:
                    registry[name] = tensors.get(joined_path(path, name), present)
