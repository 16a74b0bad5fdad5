"""The memory that compiled code reads and writes, counted by operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode


class _Counting(TorchDispatchMode):
    """Counts the bytes of tensors that operators read and make; views cost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not any(each.alias_info for each in func._schema.returns):
            tensors = _pytree.tree_leaves((args, kwargs, result))
            self.nbytes += sum(each.nbytes for each in tensors if isinstance(each, Tensor))
        return result


def traffic_of(call: Any, *args: Any) -> int:
    """Return the bytes that the operators of a call read and write."""
    with torch.no_grad(), _Counting() as counting:
        call(*args)
    return counting.nbytes
