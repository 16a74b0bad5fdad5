"""Linear layers, and the weights that they pack."""

from opgraft.ops.linear.modules import Linear

__all__ = ["Linear"]
