"""Routing of tokens to experts."""

from opgraft.ops.moe.routing.modules import *
