"""Convolutions."""

from opgraft.ops.conv.modules import *
