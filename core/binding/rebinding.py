"""``rebind`` decides anew on the kernels of an existing model."""

from __future__ import annotations

from dataclasses import dataclass

from opgraft.binding.arguments import expect_module
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.specialisation import Binding, bind, enforced, own_constructor
from torch import nn


@dataclass(frozen=True)
class Rebinding:
    """The outcome for one op of a model.

    Attributes:
        path: the place of the op in the model, such as ``layers.0.norm``.
        before: the kernel before ``rebind``.
        after: the kernel after ``rebind``.
        reason: why the op could not change; empty if the op has changed.
    """

    path: str
    before: str
    after: str
    reason: str = ""


def rebind(model: nn.Module) -> list[Rebinding]:
    """Decide again for every op of ``model``, after the configuration or the plugins changed.

    A new kernel is a new ``__class__`` of the op. Parameters, buffers and hooks stay the same
    objects. An op can take the class of a replacement, or go back, only if the two classes share
    the constructor. If a replacement has a constructor of its own, the op stays as it is, and the
    reason says so. If any choice raises, no op has changed.

    Returns:
        One row per op with a change, or with a reason against the change.

    Raises:
        OpgraftError: as constructing one of the ops anew would.
    """
    expect_module("rebind", model)
    # All choices come first, so that none raises after an op has changed.
    plans = []
    for path, module in model.named_modules():
        if isinstance(module, CustomOp):
            new = bind(module.binding.replacement.target)
            plans.append((path, module, new))
    rows = []
    for path, op, new in plans:
        row = _rebound(path, op, new)
        if row is not None:
            rows.append(row)
    return rows


def _rebound(path: str, op: CustomOp, new: Binding) -> Rebinding | None:
    """Give an op the new binding; return the row, or ``None`` if nothing has changed."""
    old_class = op.op_class
    old_kernel = op.binding.kernel.winner
    before = str(old_kernel)
    reason = _obstacle_to_rebinding(op, new)
    if not reason:
        op._adopt(enforced(new) if op.binding.enforced else new)
    kernel = op.binding.kernel.winner
    is_same = op.op_class is old_class and kernel == old_kernel
    if is_same and not reason:
        return None
    return Rebinding(path, before, str(kernel), reason)


def _obstacle_to_rebinding(op: CustomOp, new: Binding) -> str:
    """Return the reason why an op cannot take another class; empty if the op can."""
    hidden = hidden_by(op)
    if hidden:
        return hidden
    old = op.op_class
    now = new.replacement.cls
    if old is now:
        return ""
    for side in (old, now):
        constructor = own_constructor(side, new.replacement.target)
        if constructor:
            return (
                f"{side.__qualname__} defines {constructor}, which an existing op never ran: "
                "construct it anew"
            )
    return ""


def hidden_by(op: CustomOp) -> str:
    """Describe other code in the place of the bound kernel; empty if a call runs the kernel."""
    if type(op) is not op.bound_class:
        return (
            f"{type(op).__name__} was derived from the op by other code, such as a parametrization"
        )
    if "forward" in vars(op):
        return "its forward was replaced on the instance, which hides whatever its class binds"
    return ""
