"""Layers made of other ops. A layer may compute several of these ops at once."""

from opgraft.ops.composites.encoder import *
from opgraft.ops.composites.experts import *
from opgraft.ops.composites.gated_mlp import *
