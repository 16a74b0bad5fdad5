"""Deciding anew for the ops of an existing model."""

from __future__ import annotations

from dataclasses import dataclass

from opgraft.binding.arguments import expect_module
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.specialisation import Binding, bind, enforced, own_constructor
from torch import nn


@dataclass(frozen=True)
class Rebound:
    """The outcome for one op: its path in the model, its kernel before and after, and why if it could not change."""

    path: str
    before: str
    after: str
    reason: str = ""


def rebind(model: nn.Module) -> list[Rebound]:
    """Decide again for every op of ``model``, after the configuration or the plugins changed.

    An op changes over by assigning its ``__class__``: its parameters, buffers and hooks stay the same objects. It can
    take the class of a replacement, or go back from one, only where their constructors are one; where a replacement has
    a constructor of its own the op stays as it is and the reason says so. If any choice raises, no op has changed.

    Returns:
        One row per op whose kernel changed or could not change.

    Raises:
        OpgraftError: as constructing one of the ops anew would.
    """
    expect_module("rebind", model)
    plans = []
    for path, module in model.named_modules():
        if isinstance(module, CustomOp):
            plans.append((path, module, bind(module.binding.replacement.target)))
    rows = []
    for path, op, new in plans:
        before = str(op.binding.kernel.winner)
        former = (op.op_class, op.binding.kernel.winner)
        reason = _obstacle_to_rebinding(op, new)
        if not reason:
            op._adopt(enforced(new) if op.binding.enforced else new)
        after = str(op.binding.kernel.winner)
        if reason or former != (op.op_class, op.binding.kernel.winner):
            rows.append(Rebound(path, before, after, reason))
    return rows


def _obstacle_to_rebinding(op: CustomOp, new: Binding) -> str:
    """Say why an op cannot take the class that it would be constructed with now, or return ""."""
    hidden = hidden_by(op)
    if hidden:
        return hidden
    old, target = op.op_class, new.replacement.target
    if old is not new.replacement.cls:
        for side in (old, new.replacement.cls):
            constructor = own_constructor(side, target)
            if constructor:
                return f"{side.__qualname__} defines {constructor}, which an existing op never ran: construct it anew"
    return ""


def hidden_by(op: CustomOp) -> str:
    """Say what stands before the kernel that the op is bound to, or return ""."""
    if type(op) is not op.binding.specialisation:
        return (
            f"{type(op).__name__} was derived from the op by other code, such as a parametrization"
        )
    if "forward" in vars(op):
        return "its forward was replaced on the instance, which hides whatever its class binds"
    return ""
