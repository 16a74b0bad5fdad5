"""Rotary position embedding of attention modules that call a function of their file for it."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
from opgraft.adapter import LeaveAlone
from opgraft.grafting.forwards import Substitution, check_forward, plain_forward
from opgraft.ops import ApplyRotaryEmb
from torch import Tensor, nn

CHILD = "opgraft_rotary"
ADAPTER = "transformers rotary function"
_HINT = "rotary"

Rotation = Callable[..., tuple[Tensor, Tensor]]


def function_of(module: nn.Module) -> str | None:
    """Name the rotary function that a module's forward calls, ``None`` if there is none or an op does its work."""
    forward = inspect.unwrap(plain_forward(module))
    if CHILD in module._modules or not isinstance(forward, FunctionType):
        return None
    names = [name for name in forward.__code__.co_names if _HINT in name]
    return next((name for name in names if isinstance(forward.__globals__.get(name), FunctionType)), None)


def check(module: nn.Module, name: str, model: nn.Module) -> None:
    """Raise ``LeaveAlone`` if the op is not what the function ``name`` computes, with the tables that it gets."""
    obstacle = check_forward(module)
    if obstacle:
        raise LeaveAlone(obstacle)
    if not _rotates_halves(plain_forward(module).__globals__[name]):
        raise LeaveAlone(f"{name} computes something else than apply_rotary_emb on the halves of a head")
    tables = [part for part in model.modules() if _makes_tables(part, type(module).__module__)]
    if not tables or not all(_repeats(table) for part in tables for table in _tables(part)):
        raise LeaveAlone("nothing in the model shows that both halves of its cosines and sines are the same")


def substitution_of(name: str) -> Substitution:
    """Lead the name of a rotary function to the op."""
    return Substitution(name, CHILD, _with_op)


def _with_op(op: nn.Module, function: Rotation) -> Rotation:
    return functools.partial(_rotate, op, function)


def _rotate(
    op: nn.Module, function: Rotation, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Do what the file's function does, by the op where the shapes are those that it takes.

    Query and key are ``[batch, heads, sequence, head_size]``; cos and sin ``[batch or 1, sequence, head_size]`` with
    two equal halves.
    """
    if args or kwargs or not (_fits(query, cos) and _fits(key, cos)) or cos.shape != sin.shape:
        return function(query, key, cos, sin, *args, **kwargs)
    half = query.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., :half]
    return _rotate_one(op, query, cos, sin), _rotate_one(op, key, cos, sin)


def _fits(x: Tensor, cos: Tensor) -> bool:
    """Return whether there is one row of the table for each token of ``x``, in its dtype."""
    if (x.dim(), cos.dim(), cos.dtype) != (4, 3, x.dtype):
        return False
    return cos.shape[0] in (1, x.shape[0]) and cos.shape[1] == x.shape[2] and cos.shape[2] == x.shape[3]


def _rotate_one(op: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    tokens = x.transpose(1, 2)
    if cos.shape[0] == 1:
        turned: Tensor = op(tokens, cos[0], sin[0])
    else:  # each row has positions of its own
        turned = op(tokens.flatten(0, 1), cos.flatten(0, 1), sin.flatten(0, 1)).view(tokens.shape)
    return turned.transpose(1, 2)


@functools.lru_cache(maxsize=256)
def _rotates_halves(function: Rotation) -> bool:
    """Return whether a function computes on random heads what the op computes, in two precisions."""
    generator = torch.Generator().manual_seed(0)
    for dtype, batch in ((torch.float64, 2), (torch.float64, 1), (torch.bfloat16, 2)):
        query, key = (torch.randn(2, heads, 5, 8, dtype=torch.float64, generator=generator) for heads in (4, 2))
        angles = torch.randn(batch, 5, 4, dtype=torch.float64, generator=generator).repeat(1, 1, 2)
        arguments = [t.to(dtype) for t in (query, key, angles.cos(), angles.sin())]
        op = _Native()
        try:
            found, wanted = function(*arguments), _rotate(op, function, *arguments)
        except Exception:  # whatever a function of another kind raises
            return False
        tolerance = 1e-12 if dtype is torch.float64 else 0.1
        if not all(_agree(a, b, tolerance) for a, b in zip(found, wanted, strict=True)):
            return False
    return True


class _Native(nn.Module):
    """The definition, whatever kernels are bound here."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return ApplyRotaryEmb.forward_native(ApplyRotaryEmb(), x, cos, sin)


def _agree(found: Any, wanted: Tensor, tolerance: float) -> bool:
    alike = isinstance(found, Tensor) and (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    return alike and bool(torch.allclose(found, wanted, atol=tolerance, rtol=tolerance))


def _makes_tables(module: nn.Module, file: str) -> bool:
    """Return whether a module of the same file makes cosines and sines of positions."""
    frequencies = any(name.endswith("inv_freq") for name in module._buffers)
    if type(module).__module__ != file or not frequencies:
        return False
    try:
        inspect.signature(module.forward).bind(None, None, **_calls(module)[0])  # as ``_tables`` calls it
    except TypeError:
        return False
    return True


def _calls(module: nn.Module) -> list[Mapping[str, Any]]:
    """Give the keyword arguments of one call for each type of layer that a module has frequencies for."""
    kinds = [kind for kind in getattr(module, "layer_types", ()) if f"{kind}_inv_freq" in module._buffers]
    return [{"layer_type": kind} for kind in kinds] or [{}]


def _tables(module: Any) -> Iterator[Tensor]:
    """Make the cosines and sines of the first positions, for each type of layer that the module knows."""
    twin = copy.deepcopy(module)  # it may note the positions that it has seen
    x = next(iter(module._buffers.values())).new_zeros(1, 4, 1)
    positions = torch.arange(4, device=x.device)[None]
    for options in _calls(module):
        with torch.no_grad():
            yield from twin.forward(x, positions, **options)


def _repeats(table: Tensor) -> bool:
    half = table.shape[-1] // 2
    return not table.is_meta and torch.equal(table[..., :half], table[..., half:])
