"""The additions of LoRA adapters.

The kernels of linear layers compute few rows of an adapter, torch computes many.
"""

from __future__ import annotations

from collections.abc import Sequence

from opgraft import functional
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from opgraft_cpu_kernels.kernels import DTYPES, REFUSED, op
from opgraft_cpu_kernels.library import path_or_none
from opgraft_cpu_kernels.linear import FEW


def add_lora_(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, bounds: Tensor, sizes: Sequence[int]
) -> None:
    """Compute the form of that name."""
    # Ids are looked up by torch. Compiled code does not know the bounds, so there all adapters
    # compute all rows.
    taken = y.dtype in DTYPES and x.dtype is y.dtype and y.is_cpu
    if taken and not is_dynamo_compiling():
        few = FEW.get((path_or_none(), y.dtype), 0)
        try:
            _add_lora_(y, x, a, b, bounds, sizes, few)
        except REFUSED:
            pass
        else:
            return
    functional.add_lora_.native(y, x, a, b, bounds, sizes)


_add_lora_ = op("add_lora_")
