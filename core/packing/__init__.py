"""Packing: linear layers without their plain weights, and taking it back."""

from opgraft.packing.replace import pack, unpack
from opgraft.packing.report import PackReport

__all__ = ["PackReport", "pack", "unpack"]
