"""Attention of modules whose forward calls torch's function for it: an op in the place of that function.

That is where a forward names it plainly: by a name of its file for the function, or as an attribute of a name for
``torch.nn.functional``. In a grafted module that name leads to the op, or to a copy of that module that has it.
"""

from __future__ import annotations

import dis
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import FunctionType, ModuleType
from typing import Any

import torch.nn.functional as F
from opgraft.binding.custom_op import CustomOp
from opgraft.grafting.attention import CHILD, is_attached, is_attention
from opgraft.grafting.forwards import Substitution, check_forward, plain_forward
from opgraft.registry.adapter import LeaveAlone
from torch import Tensor, nn

ADAPTER = "torch's attention function"
_FUNCTION = "scaled_dot_product_attention"
_BACKENDS = "sdpa_kernel"


def calls_attention(module: nn.Module) -> bool:
    """Return whether the code of a forward, of whatever library, names torch's attention function."""
    forward = plain_forward(module)
    if is_attached(module) or is_attention(module) or not isinstance(forward, FunctionType):
        return False
    return (
        _FUNCTION in forward.__code__.co_names and forward.__module__.partition(".")[0] != "torch"
    )


def check(module: nn.Module) -> None:
    """Raise ``LeaveAlone`` if the function cannot be exchanged in a forward, or not without doubt."""
    obstacle = check_forward(module)
    if obstacle:
        raise LeaveAlone(obstacle)
    if _name(module) is None:
        raise LeaveAlone(f"its file has no name of its own for {_FUNCTION} or torch.nn.functional")
    if _BACKENDS in plain_forward(module).__code__.co_names:
        raise LeaveAlone(f"it chooses among torch's kernels by {_BACKENDS}")


def check_op(op: CustomOp) -> None:
    """Raise ``LeaveAlone`` if the op is no more than torch's function."""
    if op.binding.kernel.winner.method == "forward_native":
        raise LeaveAlone(f"here {_FUNCTION} is its native definition, which is torch's function")


def substitution_of(module: nn.Module) -> Substitution:
    """Lead the name by which the forward of a module, which ``check`` has passed, finds the function to the op."""
    return Substitution(_name(module) or "", CHILD, _with_op)


def _name(module: nn.Module) -> str | None:
    forward = plain_forward(module)
    for instruction, following in pairwise(dis.get_instructions(forward.__code__)):
        if instruction.opname == "LOAD_GLOBAL":
            found = forward.__globals__.get(instruction.argval)
            if found is F.scaled_dot_product_attention or (
                found is F and following.argval == _FUNCTION
            ):
                return str(instruction.argval)
    return None


def _with_op(op: nn.Module, found: Any) -> Any:
    """Give what the forward finds: the function by the op, or torch's module with it."""
    if not isinstance(found, ModuleType):
        return partial(attention, op, found)
    copied = ModuleType(found.__name__, found.__doc__)
    copied.__dict__.update(
        vars(found), scaled_dot_product_attention=partial(attention, op, getattr(found, _FUNCTION))
    )
    return copied


def attention(
    op: nn.Module,
    function: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Attend by ``op`` over ``[batch, heads, sequence, size]``; what has other dimensions goes to torch's function."""
    alike = query.dim() == 4 and query.shape[:2] == key.shape[:2] == value.shape[:2]
    plain = alike and not query.is_nested and query.dtype == key.dtype == value.dtype
    return (op if plain else function)(query, key, value, *args, **kwargs)
