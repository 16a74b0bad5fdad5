"""Layers made of other ops. A layer may compute several of these ops at once."""

from opgraft.ops.composites.encoder import MLP, LinearAct, LinearAddNorm
from opgraft.ops.composites.experts import Experts
from opgraft.ops.composites.gated_mlp import GatedMLP

__all__ = ["Experts", "GatedMLP", "LinearAct", "LinearAddNorm", "MLP"]
