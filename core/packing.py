"""Packing: linear layers without their plain weights, and taking it back."""

from opgraft.ops.linear.pack import pack, unpack
from opgraft.ops.linear.pack_report import PackReport

__all__ = ["PackReport", "pack", "unpack"]
