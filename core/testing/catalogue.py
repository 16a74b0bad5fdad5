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
    """Import the spec of every folder of ``opgraft.ops`` that has one."""
    for folder in pkgutil.walk_packages(ops.__path__, "opgraft.ops."):
        if folder.ispkg and find_spec(f"{folder.name}.spec"):
            yield import_module(f"{folder.name}.spec")


FAMILIES = tuple(_families())
"""The modules that hold the specs, one for each family."""

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
