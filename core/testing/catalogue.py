"""All specs, by the name of their form."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from opgraft.ops.activation import spec as activation
from opgraft.ops.attention import spec as attention
from opgraft.ops.conv import spec as conv
from opgraft.ops.fused_collectives import spec as fused_collectives
from opgraft.ops.fused_moe import spec as fused_moe
from opgraft.ops.fused_quantization import spec as fused_quantization
from opgraft.ops.latent_attention import spec as latent_attention
from opgraft.ops.layernorm import spec as layernorm
from opgraft.ops.linear import spec as linear
from opgraft.ops.quantization import spec as quantization
from opgraft.ops.quantized_linear import spec as quantized_linear
from opgraft.ops.quantized_moe import spec as quantized_moe
from opgraft.ops.rotary import spec as rotary
from opgraft.ops.routing import spec as routing
from opgraft.ops.spec import OpSpec
from opgraft.ops.state_space import spec as state_space

FAMILIES = (
    activation,
    attention,
    conv,
    fused_collectives,
    fused_moe,
    fused_quantization,
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
"""The modules that hold the specs, each a family."""

SPECS: Mapping[str, OpSpec] = MappingProxyType(
    {spec.functional.name: spec for family in FAMILIES for spec in family.SPECS}
)
"""Each functional form's spec, by the form's name."""
