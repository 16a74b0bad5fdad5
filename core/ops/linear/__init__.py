"""Linear layers, whole or in parts, merged or transposed."""

from opgraft.ops.linear.merged import MergedColumnParallelLinear, QKVParallelLinear
from opgraft.ops.linear.modules import Linear
from opgraft.ops.linear.parallel import (
    ColumnParallelLinear,
    LinearBase,
    ReplicatedLinear,
    RowParallelLinear,
)
from opgraft.ops.linear.transposed import TransposedLinear

__all__ = [
    "ColumnParallelLinear",
    "Linear",
    "LinearBase",
    "MergedColumnParallelLinear",
    "QKVParallelLinear",
    "ReplicatedLinear",
    "RowParallelLinear",
    "TransposedLinear",
]
