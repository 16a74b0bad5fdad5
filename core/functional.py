"""The ops as functions of tensors and settings.

Each function runs the kernel that its op is bound to here and now, where the class of that kernel names it in its
``functional_<key>``, and costs next to nothing more than calling it. Of a kernel that comes as a method only, modules
alone have the use: the function runs its native definition, and the op's decision says so.

The same functions are registered as ``torch.ops.opgraft.<name>``, for graphs that must show each as one node. These
run without autocast. Functions whose names end in ``_`` write to their arguments, ``write_kv_cache`` and
``concat_and_cache_mla`` to their cache, and the updates of states to those and to ``out``; no other does. Registered,
they refuse arguments that require a gradient, where gradients are recorded.
"""

from opgraft.ops.activation.functional import *
from opgraft.ops.attention.functional import *
from opgraft.ops.attention.paged import *
from opgraft.ops.conv.functional import *
from opgraft.ops.fused_collectives.functional import *
from opgraft.ops.fused_moe.functional import *
from opgraft.ops.fused_quantization.functional import *
from opgraft.ops.fused_rotary.functional import *
from opgraft.ops.latent_attention.functional import *
from opgraft.ops.layernorm.functional import *
from opgraft.ops.linear.functional import *
from opgraft.ops.quantization.fp4 import *
from opgraft.ops.quantization.functional import *
from opgraft.ops.quantized_attention.functional import *
from opgraft.ops.quantized_linear.functional import *
from opgraft.ops.quantized_moe.functional import *
from opgraft.ops.rotary.functional import *
from opgraft.ops.routing.functional import *
from opgraft.ops.state_space.functional import *

# A type checker reads the imports above. It would take an assignment for the whole list of exported names.
globals()["__all__"] = [name for name in globals() if not name.startswith("_")]
