"""Building an op around a module's parameters, putting it in the module's place, and handing the parameters back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from inspect import isdatadescriptor, isroutine
from typing import Any

import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.errors import GraftError, PackError
from opgraft.ops.freezing import restore_linear_layers
from opgraft.ops.weights import ReleasesWeights, call_post_load_hook, has_post_load_hook
from opgraft.registry.adapter import LeaveAlone
from torch import nn
from torch.nn.utils import parametrize

_KEPT = "_opgraft_original"
_REGISTRIES = ("_parameters", "_buffers")
_SETTING = (int, float, str, type(None))
_PLAIN = (nn.Parameter, type(None))


@dataclass(frozen=True)
class Shared:
    """One dictionary of parameters or buffers that a module and the op in its place have in common.

    Attributes:
        path: of the part, below the op and below the module.
        owner: the part of the module.
        registry: which of its dictionaries.
        names: what the part had in it, and whether that was a tensor.
    """

    path: str
    owner: nn.Module
    registry: str
    names: Mapping[str, bool]

    def tensors(self) -> list[str]:
        """Return the full names of what was a tensor."""
        return [_join(self.path, name) for name, present in self.names.items() if present]


@dataclass(frozen=True)
class Original:
    """The module that an op stands for, kept out of the op's submodules: its tensors would be listed twice.

    The two share their dictionaries of parameters and buffers, so that a weight exchanged in the op is not kept alive
    here, and other code that holds the module computes with what the op has.

    Attributes:
        module: the module.
        shared: the dictionaries that they share.
        attributes: the module's public attributes, with the values that the op had when it took the place.
    """

    module: nn.Module
    shared: tuple[Shared, ...]
    attributes: Mapping[str, Any]


def build_op(
    op_class: type[nn.Module], arguments: Mapping[str, Any], module: nn.Module, device: torch.device
) -> nn.Module:
    """Construct an op with the module's parameters, buffers, children, training flag and public attributes.

    The module is not changed. The op is constructed without memory first, and once more if it has tensors of its own:
    on the device of the module's, or on ``device`` where the module has none.

    Raises:
        LeaveAlone: the op's parameters are not those of the module, or would not become those again.
    """
    op = _constructed(op_class, arguments, module, torch.device("meta"))
    if has_post_load_hook(op) and not isinstance(op, ReleasesWeights):
        raise LeaveAlone(
            f"{type(op).__qualname__} defines process_weights_after_loading, and no release_weights that takes it back"
        )
    real = next((t.device for t in _tensors(module).values()), device)
    # What an op computes for itself, such as a table of cosines, must be there in numbers.
    if real.type != "meta" and any(tensor.is_meta for tensor in _all_tensors(op)):
        op = _constructed(op_class, arguments, module, real)
    for part in set(op.modules()) - set(module.modules()):
        part.training = module.training
    _take_children(op, module)
    _copy_attributes(op, module)
    return op


def install(op: nn.Module, module: nn.Module, path: str) -> None:
    """Let an op of ``build_op`` share the module's dictionaries of tensors, and remember the module at ``path``.

    Raises:
        WeightError: the op has a hook for weights that are loaded, which raised.
    """
    attributes = {
        name: getattr(op, name, value) for name, value in _public_attributes(module).items()
    }
    op.__dict__[_KEPT] = Original(module, tuple(_share(op, module)), attributes)
    if has_post_load_hook(op):
        call_post_load_hook(path, op)


def original_of(module: nn.Module) -> nn.Module | None:
    """Return the module that an op stands for, ``None`` for any other module."""
    kept = module.__dict__.get(_KEPT)
    return kept.module if isinstance(kept, Original) else None


def check_restorable(op: nn.Module) -> None:
    """Raise ``GraftError`` if other code has changed an op so that its module would not be what the op is now."""
    if original_of(op) is None or parametrize.is_parametrized(op):
        return
    name = op.op_class.__name__ if isinstance(op, CustomOp) else type(op).__name__
    if isinstance(op, CustomOp) and type(op) is not op.binding.specialisation:
        raise GraftError(
            f"{name} was given the class {type(op).__name__} by other code, such as fully_shard, which stays with the "
            "op: take that back first, or ungraft before it"
        )
    foreign = [
        f"{key} is a {type(p).__name__}"
        for key, p in op._parameters.items()
        if type(p) not in _PLAIN
    ]
    if foreign and (op._forward_hooks or op._forward_pre_hooks):
        raise GraftError(
            f"the {foreign[0]} of {name}, whose hooks stay with the op: it was parallelized while grafted, as by "
            "parallelize_module. Ungraft before that"
        )


def put_back(op: nn.Module, sharing: bool = False) -> nn.Module:
    """Return the module that an op stands for, with the op's tensors, training flag and changed settings.

    Weights are plain. Any other module is returned unchanged.

    Args:
        op: the op.
        sharing: let the module keep the dictionaries of tensors that it shares with the op, where they have the same
            names. What shards parameters knows the op and exchanges them there.

    Raises:
        GraftError: the op lacks a parameter or buffer of the module, or its packed weights cannot be put back.
    """
    kept = op.__dict__.get(_KEPT)
    if not isinstance(kept, Original):
        return op
    _restore(op)
    if isinstance(op, ReleasesWeights):
        op.release_weights()
    original, held = kept.module, _tensors(op)
    lost = sorted({name for row in kept.shared for name in row.tensors()} - held.keys())
    if lost:
        raise GraftError(
            f"{type(op).__name__} no longer has {', '.join(lost)} of the {type(original).__name__} in whose place it "
            "stands: take back what changed it, such as a parametrization, before ungrafting"
        )
    for row in kept.shared:
        present = {
            name: tensor is not None for name, tensor in getattr(row.owner, row.registry).items()
        }
        if not sharing or present != row.names:
            row.owner.__dict__[row.registry] = {
                name: held[_join(row.path, name)] if present else None
                for name, present in row.names.items()
            }
    for name, before in kept.attributes.items():
        now = getattr(op, name, before)
        if isinstance(now, _SETTING) and isinstance(before, _SETTING) and now != before:
            setattr(original, name, now)
    for part in set(original.modules()) - set(op.modules()):
        part.training = op.training
    del op.__dict__[_KEPT]
    return original


def _restore(op: nn.Module) -> None:
    try:
        restore_linear_layers(op)
    except PackError as error:
        raise GraftError(f"{type(op).__name__}: {error}") from error


def _take_children(op: nn.Module, module: nn.Module) -> None:
    """Give an op the module's children that it lacks, and those that are what it would construct itself.

    Hooks on them, and what other code holds of them, then outlive ``graft`` and ``ungraft``. They come in the order
    that they have in the module, by which optimizers number parameters.
    """
    own = dict(op._modules)
    op._modules.clear()
    for name, child in module._modules.items():
        mine = own.pop(name, child)
        op._modules[name] = child if type(mine) is type(child) else mine
    op._modules.update(own)


def _copy_attributes(op: nn.Module, module: nn.Module) -> None:
    """Give the op the module's public attributes that it lacks, for code that reads them."""
    present = set(dir(op))
    op.__dict__.update(
        {name: value for name, value in _public_attributes(module).items() if name not in present}
    )


def _public_attributes(module: nn.Module) -> dict[str, Any]:
    """Collect what a module and its classes define under public names, methods and properties apart."""
    values: dict[str, Any] = {}
    for cls in [cls for cls in reversed(type(module).__mro__) if cls not in nn.Module.__mro__]:
        members = vars(cls).items()
        values |= {
            name: value
            for name, value in members
            if not (isroutine(value) or isdatadescriptor(value))
        }
    values |= vars(module)
    return {
        name: value
        for name, value in values.items()
        if not name.startswith("_") and name != "training"
    }


def _share(op: nn.Module, module: nn.Module) -> Iterator[Shared]:
    """Make the module's dictionaries of tensors the op's too, with what the op has of its own added."""
    parts = dict(op.named_modules(remove_duplicate=False))
    for path, owner in module.named_modules():
        for registry in _REGISTRIES if path in parts else ():
            part, tensors = parts[path], getattr(owner, registry)
            names = {name: tensor is not None for name, tensor in tensors.items()}
            if not any(names.values()):
                continue
            yield Shared(path, owner, registry, names)
            owner._non_persistent_buffers_set |= part._non_persistent_buffers_set
            part._non_persistent_buffers_set = owner._non_persistent_buffers_set
            own = {
                name: tensor for kind in _REGISTRIES for name, tensor in getattr(part, kind).items()
            }
            for name in [
                name for name, present in names.items() if not present and own.get(name) is not None
            ]:
                del tensors[name]  # it would hide what the op has under that name
            tensors.update(
                {n: t for n, t in getattr(part, registry).items() if tensors.get(n) is None}
            )
            part.__dict__[registry] = tensors


def _join(path: str, name: str) -> str:
    return f"{path}.{name}".lstrip(".")


def _constructed(
    op_class: type[nn.Module], arguments: Mapping[str, Any], module: nn.Module, device: torch.device
) -> nn.Module:
    with device:
        op = op_class(**arguments)
    _check_fit(op, module)
    _put(op, _tensors(module))
    return op


def _check_fit(op: nn.Module, module: nn.Module) -> None:
    ours, theirs = _persistent(op), _persistent(module)
    if ours.keys() != theirs.keys():
        differing = ", ".join(sorted(ours.keys() ^ theirs.keys()))
        raise LeaveAlone(
            f"{type(op).__name__} does not have the same parameters: they differ in {differing}"
        )
    for name, tensor in theirs.items():
        if ours[name].shape != tensor.shape:
            shapes = f"{tuple(ours[name].shape)} instead of {tuple(tensor.shape)}"
            raise LeaveAlone(f"{type(op).__name__} has {name} of shape {shapes}")


def _persistent(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that a checkpoint holds of a module, read without its hooks."""
    transient = {
        _join(path, name)
        for path, owner in module.named_modules(remove_duplicate=False)
        for name in owner._non_persistent_buffers_set
    }
    return {name: tensor for name, tensor in _tensors(module).items() if name not in transient}


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(module.named_buffers(remove_duplicate=False))}


def _all_tensors(op: nn.Module) -> Iterator[torch.Tensor]:
    """Yield parameters, buffers and tensors that are plain attributes."""
    yield from _tensors(op).values()
    for part in op.modules():
        yield from (value for value in vars(part).values() if isinstance(value, torch.Tensor))


def _put(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Make ``tensors`` the parameters and buffers of those names, the same objects, where the module has such."""
    for path, owner in module.named_modules(remove_duplicate=False):
        for registry in (owner._parameters, owner._buffers):
            for name, present in registry.items():
                if present is not None:
                    registry[name] = tensors.get(_join(path, name), present)
