"""zentorch's operators, and the tensors that they take on this processor.

zentorch keeps copies of weights by default, and finds a copy by the address of the weight. A new
weight at the address of a freed one is then multiplied by former numbers, and so is a weight after
a write. The kernels of this plugin call only operators with packed weights: zentorch makes no
copies of these.
"""

from __future__ import annotations

import torch
import zentorch  # noqa: F401  # defines the operators
from torch import Tensor

OPERATORS = torch.ops.zentorch

DTYPES = {torch.float32}
"""The dtypes of products and norms. float16 would need AVX512-FP16."""

if OPERATORS.zentorch_is_bf16_supported():
    DTYPES.add(torch.bfloat16)


def is_plain(x: Tensor, dtype: torch.dtype) -> bool:
    """Return True for an ordinary tensor on the CPU with this dtype."""
    if x.dtype is not dtype or not x.is_cpu:
        return False
    # A nested tensor has no sizes to compare.
    return not x.is_nested and x.layout is torch.strided
