"""Routing of tokens to experts."""

from opgraft.ops.routing.modules import GroupedTopk

__all__ = ["GroupedTopk"]
