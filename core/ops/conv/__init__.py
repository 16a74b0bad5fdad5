"""Convolutions."""

from opgraft.ops.conv.modules import Conv2dLayer, Conv3dLayer

__all__ = ["Conv2dLayer", "Conv3dLayer"]
