"""All specs, by the name of their form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch
from opgraft.binding.comparison import Tolerance
from opgraft.ops.activation import spec as activation
from opgraft.ops.attention import spec as attention
from opgraft.ops.conv import spec as conv
from opgraft.ops.fused_collectives import spec as fused_collectives
from opgraft.ops.fused_moe import spec as fused_moe
from opgraft.ops.fused_quantization import spec as fused_quantization
from opgraft.ops.fused_rotary import spec as fused_rotary
from opgraft.ops.latent_attention import spec as latent_attention
from opgraft.ops.layernorm import spec as layernorm
from opgraft.ops.linear import spec as linear
from opgraft.ops.quantization import spec as quantization
from opgraft.ops.quantized_attention import spec as quantized_attention
from opgraft.ops.quantized_linear import spec as quantized_linear
from opgraft.ops.quantized_moe import spec as quantized_moe
from opgraft.ops.rotary import spec as rotary
from opgraft.ops.routing import spec as routing
from opgraft.ops.spec import TOLERANCES, OpSpec
from opgraft.ops.state_space import spec as state_space
from opgraft.state import host_state

FAMILIES = (
    activation,
    attention,
    conv,
    fused_collectives,
    fused_moe,
    fused_quantization,
    fused_rotary,
    latent_attention,
    layernorm,
    linear,
    quantization,
    quantized_attention,
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


def specs_of(target: type) -> list[OpSpec]:
    """Return the specs of the forms of an op class, those of its bases included."""
    registry = host_state().registry
    return [
        spec
        for spec in SPECS.values()
        if registry.find_target(spec.functional.op) in target.__mro__
    ]


def tolerance_of(targets: Iterable[type], dtypes: Iterable[torch.dtype]) -> Tolerance:
    """Return how far two implementations of ops may be apart: each may be off by the tolerance of the op's spec.

    Of several specs and dtypes it is the widest; the usual one where there is no spec.
    """
    tables = [spec.tolerances for target in targets for spec in specs_of(target)] or [{}]
    pairs = [{**TOLERANCES, **table}.get(dtype) for table in tables for dtype in dtypes]
    known = [pair for pair in pairs if pair] or [(0.0, 0.0)]
    return 2 * max(pair[0] for pair in known), 2 * max(pair[1] for pair in known)
