"""Layers of experts. Each token visits few experts."""

from opgraft.ops.moe.fused.methods import *
from opgraft.ops.moe.fused.modular import *
from opgraft.ops.moe.fused.modules import *
