"""Activations, plain and gated."""

from opgraft.ops.activation.modules import *
from opgraft.ops.activation.xielu import *
