"""The catalogue of ops, a family per folder.

A folder holds the functional forms with their native definitions (``functional``), the modules
(``modules``), kernels in Triton (``triton``) and the proof (``spec``). The ``__all__`` of a folder
lists the ops of the family.
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

# A type checker reads the imports above. It would take an assignment for the whole list of names.
globals()["__all__"] = [
    name
    for name, value in globals().items()
    if not name.startswith("_") and not isinstance(value, types.ModuleType)
]
