"""The ops as functions of tensors and settings.

A function runs the kernel of its op in this process, if ``functional_<key>`` of the kernel's class
names the kernel. Otherwise the native definition runs. ``torch.ops.opgraft.<name>`` is the same
function without autocast, one node of a graph.

``write_kv_cache``, ``concat_and_cache_mla``, updates of states and functions with a name such as
``silu_`` write to arguments. If gradients are recorded, the ops of these functions refuse arguments
that require a gradient.
"""

from opgraft.binding.functional import Functional as _Functional
from opgraft.ops.activation.functional import *
from opgraft.ops.attention.functional import *
from opgraft.ops.attention.latent.functional import *
from opgraft.ops.attention.paged import *
from opgraft.ops.attention.quantized.functional import *
from opgraft.ops.conv.functional import *
from opgraft.ops.fused.collectives.functional import *
from opgraft.ops.fused.quantization.functional import *
from opgraft.ops.fused.rotary.functional import *
from opgraft.ops.layernorm.functional import *
from opgraft.ops.linear.functional import *
from opgraft.ops.linear.lora.functional import *
from opgraft.ops.linear.lossless.functional import *
from opgraft.ops.linear.quantized.functional import *
from opgraft.ops.moe.fused.functional import *
from opgraft.ops.moe.quantized.functional import *
from opgraft.ops.moe.routing.functional import *
from opgraft.ops.quantization.fp4 import *
from opgraft.ops.quantization.functional import *
from opgraft.ops.rotary.functional import *
from opgraft.ops.state_space.functional import *

# A type checker reads the imports above. It would take an assignment for the whole list of names.
globals()["__all__"] = [name for name, value in globals().items() if isinstance(value, _Functional)]
