"""Deciding anew for the ops of an existing model."""

from __future__ import annotations

from dataclasses import dataclass

from opgraft.binding import bind, enforced
from opgraft.custom_op import CustomOp
from opgraft.state import host_state
from torch import nn


@dataclass(frozen=True)
class Rebound:
    """What became of one op: its path in the model, its kernel before and after, and why if it could not change."""

    path: str
    before: str
    after: str
    reason: str = ""


def rebind(model: nn.Module) -> list[Rebound]:
    """Decide again for every op of ``model``, after the configuration or the plugins changed.

    An op changes over by assigning its ``__class__``: its parameters, buffers and hooks stay the same objects. It can
    take the class of a replacement, or go back from one, only where their constructors are one; where a replacement has
    a constructor of its own the op stays as it is and the reason says so.

    Returns:
        One row per op whose kernel changed or could not change.
    """
    rows = []
    for path, module in model.named_modules():
        if isinstance(module, CustomOp):
            before = str(module.decision.chosen)
            reason = _rebind_one(module)
            after = str(module.decision.chosen)
            if reason or before != after:
                rows.append(Rebound(path, before, after, reason))
    return rows


def _rebind_one(op: CustomOp) -> str:
    """Give the op the class that it would be constructed with now; returns the reason if it must stay as it is."""
    if type(op) is not op._binding.specialisation:
        return f"{type(op).__name__} was derived from the op by other code, such as a parametrization"
    new = bind(_original_target(op.op_class))
    for side in (op.op_class, new.replacement.cls):
        constructor = _own_constructor(side, new.replacement.target)
        if side is not new.replacement.target and op.op_class is not new.replacement.cls and constructor:
            return f"{side.__qualname__} defines {constructor}, which an existing op never ran: construct the op anew"
    op._adopt(enforced(new) if op._binding.enforced else new)
    return ""


def _original_target(cls: type) -> type:
    """The class whose construction yields ``cls``: the target of a replacement, else the class itself."""
    declared = host_state().registry.replacements
    return next((r.target for r in declared if r.cls is cls and r.target is not None), cls)


def _own_constructor(cls: type, target: type) -> str | None:
    """A method that sets up instances and that ``cls``, or a class between it and ``target``, defines."""
    between = cls.__mro__[: cls.__mro__.index(target)] if target in cls.__mro__ else ()
    names = ("__init__", "__new__", "__setstate__")
    return next((name for base in between for name in names if name in vars(base)), None)
