"""Norms."""

from opgraft.ops.layernorm.modules import *
