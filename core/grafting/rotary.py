"""Rotary position embedding of attention modules that call a function of their file for it."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
from opgraft.grafting.forwards import Substitution, check_forward, plain_forward
from opgraft.grafting.rotations import Function, Rotation, rotation_of
from opgraft.grafting.side_effects import side_effect_of_function
from opgraft.ops import ApplyRotaryEmb
from opgraft.registry.adapter import LeaveAlone
from torch import Tensor, nn

CHILD = "opgraft_rotary"
ADAPTER = "transformers rotary function"
_HINT = "rotary"


def function_of(module: nn.Module) -> str | None:
    """Name the rotary function that a module's forward calls, ``None`` if there is none or an op does its work."""
    forward = plain_forward(module)
    if CHILD in module._modules or not isinstance(forward, FunctionType):
        return None
    names = [name for name in forward.__code__.co_names if _HINT in name]
    return next(
        (name for name in names if isinstance(forward.__globals__.get(name), FunctionType)), None
    )


def check(module: nn.Module, name: str, model: nn.Module) -> None:
    """Raise ``LeaveAlone`` if the op is not what the function ``name`` computes, with the tables that it gets."""
    obstacle = check_forward(module)
    if obstacle:
        raise LeaveAlone(obstacle)
    effect = side_effect_of_function(plain_forward(module).__globals__[name])
    if effect:
        raise LeaveAlone(effect)
    rotation = _rotation_of(module, name)
    if rotation is None:
        raise LeaveAlone(
            f"{name} computes something else than apply_rotary_emb on a query and a key"
        )
    tables = [part for part in model.modules() if _makes_tables(part, type(module).__module__)]
    if not tables or not all(rotation.repeats(table) for part in tables for table in _tables(part)):
        raise LeaveAlone(
            "nothing in the model shows that its cosines and sines have each number twice"
        )


def op_of(module: nn.Module, name: str) -> ApplyRotaryEmb:
    """Construct the op that does the work of the function ``name``, which ``check`` has passed."""
    rotation = _rotation_of(module, name)
    return ApplyRotaryEmb(is_neox_style=rotation is None or rotation.is_neox_style())


def substitution_of(name: str) -> Substitution:
    """Lead the name of a rotary function to the op."""
    return Substitution(name, CHILD, _with_op)


def _rotation_of(module: nn.Module, name: str) -> Rotation | None:
    return rotation_of(plain_forward(module).__globals__[name])


def _with_op(op: Any, function: Function) -> Function:
    rotation = rotation_of(
        function
    )  # ``None`` for a model that was unpickled beside another version of its file
    return function if rotation is None else functools.partial(_rotate, op, function, rotation)


def _rotate(
    op: ApplyRotaryEmb,
    function: Function,
    rotation: Rotation,
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Do what the file's function does, by the op where the shapes are those that it takes."""
    fits = rotation.fits(query, cos) and rotation.fits(key, cos) and cos.shape == sin.shape
    if args or kwargs or not fits:
        return function(query, key, cos, sin, *args, **kwargs)
    if rotation.takes_all(query, key, cos):
        return op.rotate_heads(query, key, cos, sin)
    return rotation.apply(op, query, cos, sin), rotation.apply(op, key, cos, sin)


def _makes_tables(module: nn.Module, file: str) -> bool:
    """Return whether a module of the same file makes cosines and sines of positions."""
    frequencies = any(name.endswith("inv_freq") for name in module._buffers)
    if type(module).__module__ != file or not frequencies:
        return False
    try:
        inspect.signature(module.forward).bind(
            None, None, **_calls(module)[0]
        )  # as ``_tables`` calls it
    except TypeError:
        return False
    return True


def _calls(module: nn.Module) -> list[Mapping[str, Any]]:
    """Give the keyword arguments of one call for each type of layer that a module has frequencies for."""
    kinds = [
        kind for kind in getattr(module, "layer_types", ()) if f"{kind}_inv_freq" in module._buffers
    ]
    return [{"layer_type": kind} for kind in kinds] or [{}]


def _tables(module: Any) -> Iterator[Tensor]:
    """Make the cosines and sines of the first positions, for each type of layer that the module knows."""
    twin = copy.deepcopy(module)  # it may note the positions that it has seen
    x = next(iter(module._buffers.values())).new_zeros(1, 4, 1)
    positions = torch.arange(4, device=x.device)[None]
    for options in _calls(module):
        with torch.no_grad():
            yield from twin.forward(x, positions, **options)
