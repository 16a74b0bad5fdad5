"""The additions of LoRA adapters to linear layers."""

from opgraft.ops.linear.lora import functional as functional
from opgraft.ops.linear.lora.modules import *
