"""Rotary position embedding of attention modules, by a function of the same file."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
from opgraft.grafting.forwards import expect_plain_forward
from opgraft.grafting.rotations import Function, Rotation, rotation_of
from opgraft.grafting.side_effects import side_effect_of_function
from opgraft.ops import ApplyRotaryEmb
from opgraft.registry.adapter import CallAdapter, FunctionCall, LeaveAlone
from torch import Tensor, nn

_HINT = "rotary"


def _recognise(call: FunctionCall) -> Mapping[str, Any] | None:
    """Accept a function with the op's rotation, if the tables of the model fit."""
    if _HINT not in call.name or not isinstance(call.found, FunctionType):
        return None

    expect_plain_forward(call.module)
    effect = side_effect_of_function(call.found)
    if effect:
        raise LeaveAlone(effect)

    rotation = rotation_of(call.found)
    if rotation is None:
        raise LeaveAlone(
            f"{call.name} computes something else than apply_rotary_emb on a query and a key"
        )

    file = type(call.module).__module__
    makers = [part for part in call.model.modules() if _makes_tables(part, file)]
    # The op takes each number once, so the tables must have each number twice.
    if not makers or not all(rotation.repeats(table) for part in makers for table in _tables(part)):
        raise LeaveAlone(
            "nothing in the model shows that its cosines and sines have each number twice"
        )

    return {"is_neox_style": rotation.is_neox_style()}


def _with_op(op: ApplyRotaryEmb, function: Function) -> Function:
    rotation = rotation_of(function)
    if rotation is None:  # a model that was unpickled beside another version of its file
        return function
    return functools.partial(_rotate, op, function, rotation)


ADAPTER = CallAdapter(
    "transformers rotary function", ApplyRotaryEmb, _recognise, _with_op, "opgraft_rotary"
)


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
    """Do the work of the file's function, by the op if the op takes these shapes."""
    fits = rotation.fits(query, cos) and rotation.fits(key, cos) and cos.shape == sin.shape
    if args or kwargs or not fits:
        return function(query, key, cos, sin, *args, **kwargs)
    if rotation.takes_all(query, key, cos):
        return op.rotate_heads(query, key, cos, sin)
    return rotation.apply(op, query, cos, sin), rotation.apply(op, key, cos, sin)


def _makes_tables(module: nn.Module, file: str) -> bool:
    """Return True if a module of the same file makes cosines and sines of positions."""
    frequencies = any(name.endswith("inv_freq") for name in module._buffers)
    if type(module).__module__ != file or not frequencies:
        return False
    try:
        # ``_tables`` would raise for a forward with other arguments.
        inspect.signature(module.forward).bind(None, None, **_calls(module)[0])
    except TypeError:
        return False
    return True


def _calls(module: nn.Module) -> list[Mapping[str, Any]]:
    """Return keyword arguments of one call for each type of layer with frequencies."""
    types = getattr(module, "layer_types", ())
    calls = [{"layer_type": kind} for kind in types if f"{kind}_inv_freq" in module._buffers]
    return [*calls] or [{}]


def _tables(module: Any) -> Iterator[Tensor]:
    """Make the cosines and sines of the first positions, for each type of layer."""
    twin = copy.deepcopy(module)  # the module may keep the positions of a call
    x = next(iter(module._buffers.values())).new_zeros(1, 4, 1)
    positions = torch.arange(4, device=x.device)[None]
    for options in _calls(module):
        with torch.no_grad():
            yield from twin.forward(x, positions, **options)
