"""The parts of a plugin to judge: each form that it serves, and each op or class without one that it replaces.

A built-in platform replaces nothing. Its parts are the ops of the catalogue that have a kernel of their own on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from opgraft.binding.functional import binding_of
from opgraft.binding.names import op_name_of
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.binding.specialisation import bind
from opgraft.ops.spec import Arguments, OpSpec
from opgraft.platform import Platform
from opgraft.plugins.discovery import HOST_DISTRIBUTION, names_of
from opgraft.plugins.selection import current_platform
from opgraft.registry.declarations import Replacement
from opgraft.registry.state import host_state
from opgraft.testing import checks, inventory
from opgraft.testing.catalogue import SPECS
from torch import nn


@dataclass(frozen=True, eq=False)
class Subject:
    """A form of an op, or an op or class without one, as a replacement computes it.

    Attributes:
        name: of the form; of the op or class where it has none.
        op: the name by which settings call it.
        replacement: declared by the plugin for ``target``; of a built-in platform's kernel, ``target`` for itself.
        spec: with inputs where the platform computes; ``None`` where there is no form.
        function: the one that the bound kernel brings for the form, or ``None``.
        built: the variants whose module holds the replacement.
        brief: whether it is judged in brief.
    """

    name: str
    op: str
    replacement: Replacement
    spec: OpSpec | None = None
    function: Callable[..., Any] | None = None
    built: tuple[str, ...] = ()
    brief: bool = False

    @property
    def target(self) -> Any:
        """The class that is replaced."""
        return self.replacement.target

    @property
    def is_op(self) -> bool:
        """Tell whether it is a module, which has kernels."""
        return not issubclass(self.target, PluggableClass)

    @property
    def proof(self) -> OpSpec:
        """The spec.

        Raises:
            ValueError: there is no form.
        """
        if self.spec is None:
            raise ValueError(
                f"{self.name} has no functional form, and so no inputs to check it with"
            )
        return self.spec

    @property
    def variants(self) -> tuple[str, ...]:
        """The variants that the plugin computes."""
        return tuple(self.proof.variants) if self.function is not None else self.built

    @property
    def compiled(self) -> tuple[str, ...]:
        """The variants to compile: all, in brief one, as that takes a hundred times as long as to compute it."""
        return self.variants[:1] if self.brief else self.variants

    def build(self, variant: str, arguments: Arguments) -> tuple[nn.Module, tuple[Any, ...]]:
        """Build the module for arguments; returns it and what to call it with.

        Raises:
            ValueError: no module stands for the form.
        """
        build = self.proof.module
        if build is None:
            raise ValueError(f"{self.name}: no module stands for this form")
        with torch.device(self.proof.device):
            op, inputs = build(**arguments)
        return (
            (_Named(op, tuple(inputs)), tuple(inputs.values()))
            if isinstance(inputs, dict)
            else (op, inputs)
        )

    def calls(self, variant: str) -> list[checks.Implementation]:
        """List what computes a variant by the plugin: the form where it brings a function, and the module."""
        modules = [checks.by_module(self.proof)] if variant in self.built else []
        return [*([self.proof.functional] if self.function is not None else []), *modules]

    def in_brief(self) -> Subject:
        """Return the same, to be judged on small inputs only."""
        return dataclasses.replace(
            self, spec=self.spec and dataclasses.replace(self.spec, large=()), brief=True
        )

    def with_variants(self) -> Subject:
        """Return the same, with the variants whose module is built of the replacement."""
        return dataclasses.replace(self, built=tuple(filter(self._is_built, self.proof.variants)))

    def _is_built(self, variant: str) -> bool:
        spec = self.proof
        if spec.module is None or spec.functional.mutates:
            return False
        op, _ = self.build(
            variant, spec.arguments(variant, spec.dtypes[0], spec.leads[1], spec.sizes[0])
        )
        return any(getattr(part, "op_class", None) is self.replacement.cls for part in op.modules())


class _Named(nn.Module):
    """Calls an op by the names of its arguments."""

    def __init__(self, op: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.op = op
        self.names = names

    def forward(self, *inputs: Any) -> Any:
        """Call the op."""
        return self.op(**dict(zip(self.names, inputs, strict=True)))


def subjects_of(plugin: str, *, brief: bool = False) -> list[Subject]:
    """List what of a plugin that is loaded is judged, in the order in which it declared its replacements.

    ``brief``: without inputs of realistic sizes, and with one variant to compile.
    """
    provider, names, _ = names_of(plugin)
    active = [
        each for each in host_state().active if each.plugin in names and each.target is not None
    ]
    found: dict[str, Subject] = {}
    for replacement in _own_kernels() if provider == HOST_DISTRIBUTION else active:
        for subject in _subjects(replacement):
            found.setdefault(subject.name, subject)
    return [subject.in_brief() if brief else subject for subject in found.values()]


def _own_kernels() -> Iterator[Replacement]:
    """Yield the classes of the catalogue that have a kernel for this platform, as if each stood in for itself."""
    for target in host_state().registry.targets():
        if not issubclass(target, PluggableClass):
            binding = bind(target)
            if binding.replacement.cls is target and binding.kernel.winner.key not in (
                "native",
                "forward",
            ):
                yield Replacement(target, target.__qualname__, target, binding.provider)


def _subjects(replacement: Replacement) -> Iterator[Subject]:
    target: Any = replacement.target
    name = op_name_of(target, host_state()) or target.__qualname__
    forms = [] if issubclass(target, PluggableClass) else inventory.functionals_of(target)
    device = current_platform().device_type
    served: list[Subject] = []
    for form in forms:
        spec = SPECS.get(form.name)
        if spec is not None and target is host_state().registry.find_target(form.op):
            function = binding_of(form).kernel.winner.functional(form.name)
            subject = Subject(
                form.name, name, replacement, dataclasses.replace(spec, device=device), function
            )
            served.append(subject.with_variants())
    served = [subject for subject in served if subject.variants]
    yield from served or [Subject(_shown(target, name), name, replacement)]


def _shown(target: type, op: str) -> str:
    """Return the name of an op or class; a variant that a name of an op switches too goes by its class."""
    record = host_state().registry.records().get(op)
    return op if record is not None and record.cls is target else target.__qualname__


def claimed_dtypes(platform: Platform) -> tuple[torch.dtype, ...]:
    """Return the floating-point dtypes that the first device of a platform takes."""
    return tuple(platform.capability().dtypes)
