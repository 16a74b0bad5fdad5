"""The catalogue of ops, a family per folder.

A family's folder holds its functional forms with their native definitions (``functional``), its modules (``modules``),
its kernels in Triton where there are some (``triton``), and its proof (``spec``). Here stand the families; which ops
one has is told by its own ``__all__``.
"""

from opgraft.binding.custom_op import CustomOp, PluggableLayer, maybe_get_oot_by_class
from opgraft.ops import (
    activation,
    attention,
    composites,
    conv,
    embedding,
    fused_moe,
    latent_attention,
    layernorm,
    linear,
    quantization,
    quantized_linear,
    quantized_moe,
    rotary,
    routing,
    state_space,
)
from opgraft.ops.activation import *
from opgraft.ops.attention import *
from opgraft.ops.composites import *
from opgraft.ops.conv import *
from opgraft.ops.embedding import *
from opgraft.ops.fused_moe import *
from opgraft.ops.latent_attention import *
from opgraft.ops.layernorm import *
from opgraft.ops.linear import *
from opgraft.ops.quantization import *
from opgraft.ops.quantized_linear import *
from opgraft.ops.quantized_moe import *
from opgraft.ops.rotary import *
from opgraft.ops.routing import *
from opgraft.ops.state_space import *

__all__ = ["CustomOp", "PluggableLayer", "maybe_get_oot_by_class"]
__all__ += activation.__all__
__all__ += attention.__all__
__all__ += conv.__all__
__all__ += embedding.__all__
__all__ += fused_moe.__all__
__all__ += latent_attention.__all__
__all__ += layernorm.__all__
__all__ += linear.__all__
__all__ += quantization.__all__
__all__ += quantized_linear.__all__
__all__ += quantized_moe.__all__
__all__ += rotary.__all__
__all__ += routing.__all__
__all__ += state_space.__all__
__all__ += composites.__all__
