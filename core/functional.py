"""The ops as functions of tensors and settings.

Each function runs the kernel that its op is bound to here and now, where the class of that kernel names it in its
``functional_<key>``, and costs next to nothing more than calling it. Of a kernel that comes as a method only, modules
alone have the use: the function runs its native definition, and the op's decision says so.

The same functions are registered as ``torch.ops.opgraft.<name>``, for graphs that must show each as one node. These
run without autocast. Functions whose names end in ``_`` write to their arguments; no other does. Registered, they
refuse arguments that require a gradient, where gradients are recorded.
"""

from opgraft import ops as _ops  # noqa: F401  # registers the ops whose kernels the functions run
from opgraft.definitions.activation import (
    fatrelu_and_mul,
    gelu,
    gelu_and_mul,
    gelu_and_mul_sparse,
    gelu_fast,
    gelu_new,
    gelu_tanh,
    mul_and_silu,
    quick_gelu,
    relu2,
    silu,
    silu_,
    silu_and_mul,
    silu_and_mul_with_clamp,
    swigluoai_and_mul,
    swiglustep_and_mul,
    xielu,
)
from opgraft.definitions.attention import mm_encoder_attn, scaled_dot_product_attention
from opgraft.definitions.conv import conv2d, conv3d
from opgraft.definitions.layernorm import (
    fused_add_gemma_rms_norm,
    fused_add_gemma_rms_norm_,
    fused_add_rms_norm,
    fused_add_rms_norm_,
    gemma_rms_norm,
    layer_norm,
    rms_norm,
    rms_norm_gated,
)
from opgraft.definitions.linear import linear
from opgraft.definitions.quantization import quant_fp8_dynamic, quant_fp8_static
from opgraft.definitions.rotary import (
    apply_rotary_emb,
    dual_chunk_rotary_embedding,
    mrope,
    rotary_embedding,
    rotary_embedding_,
)
from opgraft.definitions.routing import grouped_topk

__all__ = [
    "apply_rotary_emb",
    "conv2d",
    "conv3d",
    "dual_chunk_rotary_embedding",
    "fatrelu_and_mul",
    "fused_add_gemma_rms_norm",
    "fused_add_gemma_rms_norm_",
    "fused_add_rms_norm",
    "fused_add_rms_norm_",
    "gelu",
    "gelu_and_mul",
    "gelu_and_mul_sparse",
    "gelu_fast",
    "gelu_new",
    "gelu_tanh",
    "gemma_rms_norm",
    "grouped_topk",
    "layer_norm",
    "linear",
    "mm_encoder_attn",
    "mrope",
    "mul_and_silu",
    "quant_fp8_dynamic",
    "quant_fp8_static",
    "quick_gelu",
    "relu2",
    "rms_norm",
    "rms_norm_gated",
    "rotary_embedding",
    "rotary_embedding_",
    "scaled_dot_product_attention",
    "silu",
    "silu_",
    "silu_and_mul",
    "silu_and_mul_with_clamp",
    "swigluoai_and_mul",
    "swiglustep_and_mul",
    "xielu",
]
