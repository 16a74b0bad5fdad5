"""Linear layers over bfloat16 weights in 12 bits."""

from opgraft.ops.linear.lossless.modules import *
