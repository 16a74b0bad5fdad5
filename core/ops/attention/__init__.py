"""Attention of encoders, and of decoders with their cache in pages."""

from opgraft.ops.attention.batch import *
from opgraft.ops.attention.decoder import *
from opgraft.ops.attention.modules import *
