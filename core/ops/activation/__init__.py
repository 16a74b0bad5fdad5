"""Activations, plain and gated."""

from opgraft.ops.activation.modules import (
    GELU,
    XIELU,
    FastGELU,
    FatreluAndMul,
    GeluAndMul,
    GeluAndMulSparse,
    GELUTanh,
    MulAndSilu,
    NewGELU,
    QuickGELU,
    ReLUSquaredActivation,
    SiLU,
    SiluAndMul,
    SiluAndMulWithClamp,
    SwigluOAIAndMul,
    SwigluStepAndMul,
)

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
    "ReLUSquaredActivation",
    "SiLU",
    "SiluAndMul",
    "SiluAndMulWithClamp",
    "SwigluOAIAndMul",
    "SwigluStepAndMul",
    "XIELU",
]
