"""All specs, by the name of their form."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from opgraft.specs import activation, attention, conv, layernorm, linear, quantization, rotary, routing
from opgraft.specs.spec import OpSpec

FAMILIES = (activation, attention, conv, layernorm, linear, quantization, rotary, routing)
"""The modules that hold the specs, each a family."""

SPECS: Mapping[str, OpSpec] = MappingProxyType({spec.form.name: spec for family in FAMILIES for spec in family.SPECS})
"""Each functional form's spec, by the form's name."""
