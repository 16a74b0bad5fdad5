"""Quantizations of a model's linear layers, by name."""

from opgraft.quantization.awq import AWQConfig
from opgraft.quantization.compressed_tensors import CompressedTensorsConfig
from opgraft.quantization.fp8 import Fp8Config
from opgraft.quantization.gguf import GGUFConfig
from opgraft.quantization.gptq import GPTQConfig
from opgraft.quantization.integers import Int4Config, Int8Config, Int8DynamicConfig
from opgraft.quantization.lossless import Lossless12Config
from opgraft.quantization.mxfp4 import Mxfp4Config
from opgraft.quantization.registry import quantization_named, quantizations

__all__ = [
    "AWQConfig",
    "CompressedTensorsConfig",
    "Fp8Config",
    "GGUFConfig",
    "GPTQConfig",
    "Int4Config",
    "Int8Config",
    "Int8DynamicConfig",
    "Lossless12Config",
    "Mxfp4Config",
    "quantization_named",
    "quantizations",
]
