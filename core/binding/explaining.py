"""The kernels that a built model runs, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from opgraft.binding.arguments import expect_module
from opgraft.binding.custom_op import CustomOp, PluggableLayer
from opgraft.binding.names import op_name_of
from opgraft.binding.rebinding import hidden_by
from opgraft.decision import Provider
from opgraft.state import host_state
from opgraft.text import table
from torch import nn

_SPARED = "not run, as the layer that it is in does its work where no gradient is required"


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
        runs: ``False`` where the layer that it is in does its work, as long as no gradient is required.
    """

    path: str
    op: str
    op_class: str
    kernel: str
    provider: Provider
    reason: str
    runs: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data, with the names that all JSON of opgraft has for it."""
        return {
            "path": self.path,
            "op": self.op,
            "class": self.op_class,
            "kernel": self.kernel,
            "provider": self.provider.to_dict(),
            "reason": self.reason,
            "runs": self.runs,
        }


@dataclass(frozen=True)
class Explanation:
    """The ops of a model, one row each, in the model's order; printed, equal ones are one line with their count."""

    rows: tuple[ExplainedOp, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain data, ready for ``json.dumps``."""
        return {"ops": [row.to_dict() for row in self.rows]}

    def __str__(self) -> str:
        if not self.rows:
            return "no module of this model is an op: see opgraft.graft"
        running = [row for row in self.rows if row.runs]
        counts = Counter((row.op, row.op_class, row.kernel, str(row.provider)) for row in running)
        first = {(row.op, row.op_class, row.kernel, str(row.provider)): row.path for row in reversed(running)}
        cells = [(str(count), *key, first[key] or "(model)") for key, count in counts.items()]
        lines = table([("count", "op", "class", "kernel", "provider", "the first"), *cells], None)
        reasons = Counter((row.kernel, row.reason) for row in running)
        told = [f"{n} x {kernel}: {reason}" for (kernel, reason), n in reasons.items()]
        spared = Counter((row.op_class, row.path.rpartition(".")[2]) for row in self.rows if not row.runs)
        return "\n".join(
            [*lines, "", *told, *(f"{n} x {cls} as {name}: {_SPARED}" for (cls, name), n in spared.items())]
        )


def explain(model: nn.Module) -> Explanation:
    """Tell which kernel each op of ``model`` is bound to, who provides it, and why.

    A module that stands in several places has one row, under its first path.

    Raises:
        TypeError: ``model`` is no module.
    """
    expect_module("explain", model)
    run = _run(model)
    ops = ((path, op) for path, op in model.named_modules() if isinstance(op, CustomOp))
    return Explanation(tuple(_row(path, op, op in run) for path, op in ops))


def _run(model: nn.Module) -> set[nn.Module]:
    """Collect the modules that a call of ``model`` may reach in one place at least."""
    reached = {model}
    left = [model]
    while left:
        layer = left.pop()
        idle = layer.idle() if isinstance(layer, PluggableLayer) else ()
        further = {child for name, child in layer.named_children() if name not in idle} - reached
        reached |= further
        left += further
    return reached


def _row(path: str, op: CustomOp, runs: bool) -> ExplainedOp:
    binding = op.binding
    name = op_name_of(binding.replacement.target, host_state()) or ""
    decision = binding.decision
    reason = hidden_by(op) or f"{decision.candidates[0].reason}; {decision.reason}"  # the winner's own comes first
    return ExplainedOp(path, name, op.op_class.__qualname__, str(binding.kernel.winner), binding.provider, reason, runs)
