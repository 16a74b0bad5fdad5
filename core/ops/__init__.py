"""The catalogue of ops, a family per folder.

A folder holds the functional forms with their native definitions (``functional``), the modules
(``modules``), kernels in Triton (``triton``) and the proof (``spec``). The ``__all__`` of a module
lists its classes of ops, and the folder exports these.
"""

import types

from opgraft.binding.custom_op import CustomOp as CustomOp
from opgraft.binding.custom_op import PluggableLayer as PluggableLayer
from opgraft.binding.custom_op import maybe_get_oot_by_class as maybe_get_oot_by_class
from opgraft.ops.activation.modules import *
from opgraft.ops.activation.xielu import *
from opgraft.ops.attention.batch import *
from opgraft.ops.attention.decoder import *
from opgraft.ops.attention.latent.layers import *
from opgraft.ops.attention.latent.modules import *
from opgraft.ops.attention.latent.wrapper import *
from opgraft.ops.attention.modules import *
from opgraft.ops.composites.encoder import *
from opgraft.ops.composites.experts import *
from opgraft.ops.composites.gated_mlp import *
from opgraft.ops.conv.modules import *
from opgraft.ops.embedding.logits import *
from opgraft.ops.embedding.vocab import *
from opgraft.ops.layernorm.modules import *
from opgraft.ops.linear.lora.modules import *
from opgraft.ops.linear.lossless.modules import *
from opgraft.ops.linear.merged import *
from opgraft.ops.linear.modules import *
from opgraft.ops.linear.parallel import *
from opgraft.ops.linear.quantized.modules import *
from opgraft.ops.linear.transposed import *
from opgraft.ops.moe.fused.methods import *
from opgraft.ops.moe.fused.modular import *
from opgraft.ops.moe.fused.modules import *
from opgraft.ops.moe.quantized.methods import *
from opgraft.ops.moe.routing.modules import *
from opgraft.ops.quantization.modules import *
from opgraft.ops.rotary.dual_chunk import *
from opgraft.ops.rotary.modules import *
from opgraft.ops.rotary.rope import *
from opgraft.ops.rotary.scaled import *
from opgraft.ops.rotary.variants import *
from opgraft.ops.rotary.vision import *
from opgraft.ops.state_space.gated_norm import *
from opgraft.ops.state_space.mamba import *
from opgraft.ops.state_space.mamba2 import *
from opgraft.ops.state_space.modules import *
from opgraft.ops.state_space.plamo2 import *
from opgraft.ops.state_space.short_conv import *

# A type checker reads the imports above. It would take an assignment for the whole list of names.
globals()["__all__"] = [
    name
    for name, value in globals().items()
    if not name.startswith("_") and not isinstance(value, types.ModuleType)
]
