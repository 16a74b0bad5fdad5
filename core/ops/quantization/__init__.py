"""Quantization of activations."""

from opgraft.ops.quantization.modules import *
