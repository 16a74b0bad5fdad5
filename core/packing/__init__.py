"""Packing: linear layers without their plain weights."""

from opgraft.packing.replace import pack as pack
from opgraft.packing.replace import unpack as unpack
from opgraft.packing.report import PackReport as PackReport
