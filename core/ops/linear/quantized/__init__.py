"""Linear layers with quantized weights."""

from opgraft.ops.linear.quantized.modules import *
