"""Packing: linear layers without their plain weights, and taking it back."""

from opgraft.ops.linear.pack_report import PackReport
from opgraft.ops.pack import pack, unpack

__all__ = ["PackReport", "pack", "unpack"]
