"""The catalogue of ops, a family per folder.

A family's folder holds its functional forms with their native definitions (``functional``), its modules (``modules``),
its kernels in Triton where there are some (``triton``), and its proof (``spec``). A family lists its ops in its own
``__all__``.
"""

import types

from opgraft.binding.custom_op import CustomOp as CustomOp
from opgraft.binding.custom_op import PluggableLayer as PluggableLayer
from opgraft.binding.custom_op import maybe_get_oot_by_class as maybe_get_oot_by_class
from opgraft.ops.activation import *
from opgraft.ops.attention import *
from opgraft.ops.attention.latent import *
from opgraft.ops.composites import *
from opgraft.ops.conv import *
from opgraft.ops.embedding import *
from opgraft.ops.layernorm import *
from opgraft.ops.linear import *
from opgraft.ops.linear.quantized import *
from opgraft.ops.moe.fused import *
from opgraft.ops.moe.quantized import *
from opgraft.ops.moe.routing import *
from opgraft.ops.quantization import *
from opgraft.ops.rotary import *
from opgraft.ops.state_space import *

# A type checker reads the imports above. It would take an assignment for the whole list of exported names.
globals()["__all__"] = [
    name
    for name, value in globals().items()
    if not name.startswith("_") and not isinstance(value, types.ModuleType)
]
