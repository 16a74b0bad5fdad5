"""Building an op around a module's parameters, and handing them back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from opgraft.adapter import LeaveAlone
from opgraft.errors import GraftError
from torch import nn

_KEPT = "_opgraft_original"


class Original:
    """The module that an op stands for, kept out of the op's submodules: its tensors would be listed twice."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module


def build_op(
    op_class: type[nn.Module], arguments: Mapping[str, Any], module: nn.Module, device: torch.device
) -> nn.Module:
    """An op with the module's parameters, buffers and training flag, which remembers the module.

    It is constructed without memory first, and once more if it has tensors of its own: on the device of the module's,
    or on ``device`` where the module has none.

    Raises:
        LeaveAlone: the op's parameters are not those of the module.
    """
    op = _constructed(op_class, arguments, module, torch.device("meta"))
    real = next((t.device for t in _tensors(module).values()), device)
    if real.type != "meta" and any(tensor.is_meta for tensor in _all_tensors(op)):
        op = _constructed(op_class, arguments, module, real)
    op.train(module.training)
    op.__dict__[_KEPT] = Original(module)
    return op


def original_of(module: nn.Module) -> nn.Module | None:
    """The module that an op stands for, ``None`` for any other module."""
    kept = module.__dict__.get(_KEPT)
    return kept.module if isinstance(kept, Original) else None


def put_back(op: nn.Module) -> nn.Module:
    """The module that an op stands for, with the op's tensors and training flag; any other module unchanged.

    Raises:
        GraftError: the op lacks a parameter or buffer of the module.
    """
    original = original_of(op)
    if original is None:
        return op
    held = _tensors(op)
    lost = sorted(_tensors(original).keys() - held)
    if lost:
        raise GraftError(
            f"{type(op).__name__} no longer has {', '.join(lost)} of the {type(original).__name__} in whose place it "
            "stands: take back what changed it, such as a parametrization, before ungrafting"
        )
    _put(original, held)
    original.train(op.training)
    del op.__dict__[_KEPT]
    return original


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
        raise LeaveAlone(f"{type(op).__name__} does not have the same parameters: they differ in {differing}")
    for name, tensor in theirs.items():
        if ours[name].shape != tensor.shape:
            shapes = f"{tuple(ours[name].shape)} instead of {tuple(tensor.shape)}"
            raise LeaveAlone(f"{type(op).__name__} has {name} of shape {shapes}")


def _persistent(module: nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint holds of a module, read without its hooks."""
    transient = {
        f"{path}.{name}".lstrip(".")
        for path, owner in module.named_modules(remove_duplicate=False)
        for name in owner._non_persistent_buffers_set
    }
    return {name: tensor for name, tensor in _tensors(module).items() if name not in transient}


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(module.named_buffers(remove_duplicate=False))}


def _all_tensors(op: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, buffers and tensors that are plain attributes."""
    yield from _tensors(op).values()
    for part in op.modules():
        yield from (value for value in vars(part).values() if isinstance(value, torch.Tensor))


def _put(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Make ``tensors`` the parameters and buffers of those names, the same objects, where the module has such."""
    for path, owner in module.named_modules(remove_duplicate=False):
        for registry in (owner._parameters, owner._buffers):
            for name, present in registry.items():
                if present is not None:
                    registry[name] = tensors.get(f"{path}.{name}".lstrip("."), present)
