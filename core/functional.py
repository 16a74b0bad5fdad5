"""The ops as functions of tensors and settings.

Each function runs the kernel that its op is bound to here and now, where the class of that kernel names it in its
``functional_<key>``, and costs next to nothing more than calling it. Of a kernel that comes as a method only, modules
alone have the use: the function runs its native definition, and the op's decision says so.

The same functions are registered as ``torch.ops.opgraft.<name>``, for graphs that must show each as one node. These
run without autocast. Functions whose names end in ``_`` write to their arguments, ``write_kv_cache`` and
``concat_and_cache_mla`` to their cache, and the updates of states to those and to ``out``; no other does. Registered,
they refuse arguments that require a gradient, where gradients are recorded.
"""

from opgraft.ops.activation import functional as _activation
from opgraft.ops.activation.functional import *
from opgraft.ops.attention import functional as _attention
from opgraft.ops.attention import paged as _paged
from opgraft.ops.attention.functional import *
from opgraft.ops.attention.paged import *
from opgraft.ops.conv import functional as _conv
from opgraft.ops.conv.functional import *
from opgraft.ops.fused_collectives import functional as _fused_collectives
from opgraft.ops.fused_collectives.functional import *
from opgraft.ops.fused_moe import functional as _fused_moe
from opgraft.ops.fused_moe.functional import *
from opgraft.ops.fused_quantization import functional as _fused_quantization
from opgraft.ops.fused_quantization.functional import *
from opgraft.ops.fused_rotary import functional as _fused_rotary
from opgraft.ops.fused_rotary.functional import *
from opgraft.ops.latent_attention import functional as _latent_attention
from opgraft.ops.latent_attention.functional import *
from opgraft.ops.layernorm import functional as _layernorm
from opgraft.ops.layernorm.functional import *
from opgraft.ops.linear import functional as _linear
from opgraft.ops.linear.functional import *
from opgraft.ops.quantization import fp4 as _fp4
from opgraft.ops.quantization import functional as _quantization
from opgraft.ops.quantization.fp4 import *
from opgraft.ops.quantization.functional import *
from opgraft.ops.quantized_attention import functional as _quantized_attention
from opgraft.ops.quantized_attention.functional import *
from opgraft.ops.quantized_linear import functional as _quantized_linear
from opgraft.ops.quantized_linear.functional import *
from opgraft.ops.quantized_moe import functional as _quantized_moe
from opgraft.ops.quantized_moe.functional import *
from opgraft.ops.rotary import functional as _rotary
from opgraft.ops.rotary.functional import *
from opgraft.ops.routing import functional as _routing
from opgraft.ops.routing.functional import *
from opgraft.ops.state_space import functional as _state_space
from opgraft.ops.state_space.functional import *

__all__: list[str] = []
__all__ += _activation.__all__
__all__ += _attention.__all__
__all__ += _paged.__all__
__all__ += _conv.__all__
__all__ += _fused_collectives.__all__
__all__ += _fused_moe.__all__
__all__ += _latent_attention.__all__
__all__ += _layernorm.__all__
__all__ += _linear.__all__
__all__ += _quantization.__all__
__all__ += _fp4.__all__
__all__ += _fused_quantization.__all__
__all__ += _quantized_attention.__all__
__all__ += _quantized_linear.__all__
__all__ += _quantized_moe.__all__
__all__ += _rotary.__all__
__all__ += _fused_rotary.__all__
__all__ += _routing.__all__
__all__ += _state_space.__all__
