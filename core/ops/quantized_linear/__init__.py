"""Linear layers with quantized weights."""

from opgraft.ops.quantized_linear.modules import FP8Linear, Int8DynamicLinear, QuantizedLinear

__all__ = ["QuantizedLinear", "Int8DynamicLinear", "FP8Linear"]
