"""Linear layers, and the weights that they pack."""

from opgraft.ops.linear.modules import Linear
from opgraft.ops.linear.transposed import TransposedLinear

__all__ = ["Linear", "TransposedLinear"]
