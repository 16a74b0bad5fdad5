"""Attention of modules with calls of torch's own function: an op in its place.

A forward must name the function plainly: by a name of the file, or as an attribute of a name for
``torch.nn.functional``. In a grafted module the name leads to the op, or to a copy of
``torch.nn.functional`` with the op.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from types import FunctionType, ModuleType
from typing import Any

import torch.nn.functional as F
from opgraft.grafting.attention import CHILD
from opgraft.grafting.forwards import expect_plain_forward, plain_forward
from opgraft.ops import ScaledDotProductAttention
from opgraft.registry.adapter import CallAdapter, FunctionCall, LeaveAlone
from torch import Tensor, nn

_FUNCTION = "scaled_dot_product_attention"
_BACKENDS = "sdpa_kernel"


def _recognise(call: FunctionCall) -> Mapping[str, Any] | None:
    """Accept the name of torch's function in a forward."""
    forward: FunctionType = plain_forward(call.module)
    names = forward.__code__.co_names
    if _FUNCTION not in names or forward.__module__.partition(".")[0] == "torch":
        return None

    name = _plain_name(forward)
    # A forward without a plain name is reported once, for the name of the function.
    if call.name != (name or _FUNCTION):
        return None

    expect_plain_forward(call.module)
    if name is None:
        raise LeaveAlone(f"its file has no name of its own for {_FUNCTION} or torch.nn.functional")
    if _BACKENDS in names:
        raise LeaveAlone(f"it chooses among torch's kernels by {_BACKENDS}")

    return {}


def _plain_name(forward: FunctionType) -> str | None:
    """Return the name in the file for the function, or for the module with the function."""
    # The attribute follows the load of the module.
    for instruction, following in pairwise(dis.get_instructions(forward.__code__)):
        if instruction.opname != "LOAD_GLOBAL":
            continue
        found = forward.__globals__.get(instruction.argval)
        is_module = found is F and following.argval == _FUNCTION
        if is_module or found is F.scaled_dot_product_attention:
            return str(instruction.argval)
    return None


def _with_op(op: nn.Module, found: Any) -> Any:
    """Return the function by the op, or torch's module with the function by the op."""
    if not isinstance(found, ModuleType):
        return partial(attention, op, found)
    # A forward may use other functions of the module, too.
    copied = ModuleType(found.__name__, found.__doc__)
    by_op = partial(attention, op, getattr(found, _FUNCTION))
    copied.__dict__.update(vars(found), scaled_dot_product_attention=by_op)
    return copied


ADAPTER = CallAdapter(
    "torch's attention function", ScaledDotProductAttention, _recognise, _with_op, CHILD, whole=True
)


def attention(
    op: nn.Module,
    function: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Attend by ``op`` over ``[batch, heads, sequence, size]``, else by torch's function."""
    alike = query.dim() == 4 and query.shape[:2] == key.shape[:2] == value.shape[:2]
    plain = alike and not query.is_nested and query.dtype == key.dtype == value.dtype
    return (op if plain else function)(query, key, value, *args, **kwargs)
