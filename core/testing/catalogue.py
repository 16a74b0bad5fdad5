"""All specs, by the name of their form."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType, ModuleType

import torch
from opgraft import ops
from opgraft.binding.comparison import Tolerance
from opgraft.ops.spec import TOLERANCES, OpSpec
from opgraft.registry.state import host_state


def _families() -> Iterator[ModuleType]:
    """Import the spec module of each family."""
    for folder in pkgutil.walk_packages(ops.__path__, "opgraft.ops."):
        if folder.ispkg and find_spec(f"{folder.name}.spec"):
            yield import_module(f"{folder.name}.spec")


FAMILIES = tuple(_families())
"""The modules with the specs, one for each family."""

SPECS: Mapping[str, OpSpec] = MappingProxyType(
    {spec.functional.name: spec for family in FAMILIES for spec in family.SPECS}
)
"""Each functional form's spec, by the form's name."""


def specs_of(target: type) -> list[OpSpec]:
    """Return the specs of the forms of an op class, including forms of the bases."""
    registry = host_state().registry
    found = []
    # A variant serves the forms of the op, too.
    for spec in SPECS.values():
        if registry.find_target(spec.functional.op) in target.__mro__:
            found.append(spec)
    return found


def tolerance_of(targets: Iterable[type], dtypes: Iterable[torch.dtype]) -> Tolerance:
    """Return the allowed distance of two implementations of ops.

    Each implementation may be off by the tolerance of the op's spec. The widest tolerance of all
    specs and dtypes counts; an op without a spec has the usual one.
    """
    kinds = list(dtypes)
    tables = [spec.tolerances for target in targets for spec in specs_of(target)]
    pairs = [(0.0, 0.0)]
    for table in tables or [{}]:
        known = {**TOLERANCES, **table}
        pairs += [known[dtype] for dtype in kinds if dtype in known]
    absolute, relative = map(max, zip(*pairs, strict=True))
    # Both implementations may be off, in opposite directions.
    return 2 * absolute, 2 * relative
