"""The additions of LoRA adapters to linear layers."""

from opgraft.ops.lora import functional as functional
from opgraft.ops.lora.modules import *
