"""Nodes of a graph, and the forms that semantic ones call."""

from __future__ import annotations

from typing import Any

import torch
from opgraft.binding.functional import FUNCTIONALS, Functional
from torch import fx

OPERATOR: Any = type(torch.ops.aten.add.Tensor)
"""The class of torch's operators, each for arguments of certain types."""

_PREFIX = "opgraft::"


def form_of(node: fx.Node) -> Functional[..., Any] | None:
    """Return the form that a semantic node calls, ``None`` of any other node."""
    target = node.target
    if not isinstance(target, OPERATOR):
        return None
    name = target.name()
    return FUNCTIONALS.get(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else None
