"""Linear layers with quantized weights."""

from opgraft.ops.linear.quantized.modules import FP8Linear, Int8DynamicLinear, QuantizedLinear

__all__ = ["QuantizedLinear", "Int8DynamicLinear", "FP8Linear"]
