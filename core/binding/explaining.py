"""The kernels that a built model runs, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from opgraft.binding.custom_op import CustomOp
from opgraft.binding.rebinding import hidden_by
from opgraft.binding.specialisation import op_name_of
from opgraft.decision import Provider
from opgraft.state import host_state
from opgraft.text import table
from torch import nn


@dataclass(frozen=True)
class ExplainedOp:
    """One op of a model.

    Attributes:
        path: of the module in the model, "" for the model itself.
        op: the name that settings know it by, or "" where its class is not registered.
        op_class: its class, a replacement perhaps.
        kernel: the class that defines its kernel and the method, such as ``RMSNorm.forward_native``.
        provider: who provides the kernel.
        reason: why that kernel, or what runs in its place.
    """

    path: str
    op: str
    op_class: str
    kernel: str
    provider: Provider
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data, with the names that all JSON of opgraft has for it."""
        return {
            "path": self.path,
            "op": self.op,
            "class": self.op_class,
            "kernel": self.kernel,
            "provider": self.provider.to_dict(),
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Explanation:
    """The ops of a model, one row each, in the model's order; printed, a table and each reason once."""

    rows: tuple[ExplainedOp, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain data, ready for ``json.dumps``."""
        return {"ops": [row.to_dict() for row in self.rows]}

    def __str__(self) -> str:
        if not self.rows:
            return "no module of this model is an op: see opgraft.graft"
        cells = [(row.path or "(model)", row.op, row.op_class, row.kernel, str(row.provider)) for row in self.rows]
        lines = table([("path", "op", "class", "kernel", "provider"), *cells], None)
        reasons = Counter((row.kernel, row.reason) for row in self.rows)
        return "\n".join([*lines, "", *(f"{n} x {kernel}: {reason}" for (kernel, reason), n in reasons.items())])


def explain(model: nn.Module) -> Explanation:
    """Tell which kernel each op of ``model`` is bound to, who provides it, and why.

    A module that stands in several places has one row, under its first path.

    Raises:
        TypeError: ``model`` is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"explain was given {model!r}, expected a torch.nn.Module")
    return Explanation(tuple(_row(path, op) for path, op in model.named_modules() if isinstance(op, CustomOp)))


def _row(path: str, op: CustomOp) -> ExplainedOp:
    binding = op.binding
    name = op_name_of(binding.replacement.target, host_state()) or ""
    decision = binding.decision
    reason = hidden_by(op) or f"{decision.candidates[0].reason}; {decision.reason}"  # the winner's own comes first
    return ExplainedOp(path, name, op.op_class.__qualname__, str(binding.kernel.winner), binding.provider, reason)
