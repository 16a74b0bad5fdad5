"""The catalogue of ops, a family per folder.

A family's folder holds its functional forms with their native definitions (``functional``), its modules (``modules``),
its kernels in Triton where there are some (``triton``), and its proof (``spec``). Here stand the families; which ops
one has is told by its own ``__all__``.
"""

from opgraft.binding.custom_op import CustomOp, PluggableLayer, maybe_get_oot_by_class
from opgraft.ops import composites
from opgraft.ops.activation import modules as activation
from opgraft.ops.activation.modules import *
from opgraft.ops.attention import modules as attention
from opgraft.ops.attention.modules import *
from opgraft.ops.composites import *
from opgraft.ops.conv import modules as conv
from opgraft.ops.conv.modules import *
from opgraft.ops.layernorm import modules as layernorm
from opgraft.ops.layernorm.modules import *
from opgraft.ops.linear import modules as linear
from opgraft.ops.linear.modules import *
from opgraft.ops.quantization import modules as quantization
from opgraft.ops.quantization.modules import *
from opgraft.ops.rotary import modules as rotary
from opgraft.ops.rotary.modules import *
from opgraft.ops.routing import modules as routing
from opgraft.ops.routing.modules import *

__all__ = ["CustomOp", "PluggableLayer", "maybe_get_oot_by_class"]
__all__ += activation.__all__
__all__ += attention.__all__
__all__ += conv.__all__
__all__ += layernorm.__all__
__all__ += linear.__all__
__all__ += quantization.__all__
__all__ += rotary.__all__
__all__ += routing.__all__
__all__ += composites.__all__
