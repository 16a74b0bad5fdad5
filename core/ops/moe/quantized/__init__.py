"""Layers of experts whose weights are quantized."""

from opgraft.ops.moe.quantized import functional as functional
from opgraft.ops.moe.quantized.methods import *
