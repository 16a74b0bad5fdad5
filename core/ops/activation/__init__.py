"""Activations, plain and gated."""

from opgraft.ops.activation.modules import (
    GELU,
    FastGELU,
    FatreluAndMul,
    GeluAndMul,
    GeluAndMulSparse,
    GELUTanh,
    MulAndSilu,
    NewGELU,
    QuickGELU,
    ReLU,
    ReLUSquaredActivation,
    SiLU,
    SiluAndMul,
    SiluAndMulWithClamp,
    SwigluOAIAndMul,
    SwigluStepAndMul,
)
from opgraft.ops.activation.xielu import XIELU

__all__ = [
    "FastGELU",
    "FatreluAndMul",
    "GELU",
    "GELUTanh",
    "GeluAndMul",
    "GeluAndMulSparse",
    "MulAndSilu",
    "NewGELU",
    "QuickGELU",
    "ReLU",
    "ReLUSquaredActivation",
    "SiLU",
    "SiluAndMul",
    "SiluAndMulWithClamp",
    "SwigluOAIAndMul",
    "SwigluStepAndMul",
    "XIELU",
]
