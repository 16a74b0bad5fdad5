"""The parts of a plugin to judge: each form, and each op or class without a form.

A built-in platform replaces nothing. The parts of the platform are the ops of the catalogue with a
kernel for that platform.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from opgraft.base.reached import ReachedLines
from opgraft.binding.functional import Functional, binding_of
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
from opgraft.testing.shapes import ShapeRecord
from torch import nn


@dataclass(frozen=True, eq=False)
class Subject:
    """A form of an op, or an op or class without a form, as a replacement computes the op.

    Attributes:
        name: of the form; of the op or class if there is no form.
        op: the name of the op in settings.
        replacement: declared by the plugin for ``target``. For a kernel of a built-in platform,
            ``target`` stands in for itself.
        spec: with inputs on the platform's device; ``None`` without a form.
        function: the function of the bound kernel for the form, or ``None``.
        built: the variants with a module that holds the replacement.
        brief: True for the short form of the kit.
        record: calls of real models to replay, or ``None``.
    """

    name: str
    op: str
    replacement: Replacement
    spec: OpSpec | None = None
    function: Callable[..., Any] | None = None
    built: tuple[str, ...] = ()
    brief: bool = False
    record: ShapeRecord | None = None

    @property
    def target(self) -> Any:
        """The class to be replaced."""
        return self.replacement.target

    @property
    def is_op(self) -> bool:
        """True for a module, which has kernels."""
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
        """The variants of the form that the plugin computes."""
        if self.function is None:
            return self.built
        return tuple(self.proof.variants)

    @property
    def dtypes(self) -> list[torch.dtype]:
        """The dtypes of both the platform and the form."""
        claimed = claimed_dtypes(current_platform())
        return [dtype for dtype in self.proof.dtypes if dtype in claimed]

    def build(self, arguments: Arguments) -> tuple[nn.Module, tuple[Any, ...]]:
        """Build the module for arguments; return the module and the inputs of a call.

        Raises:
            ValueError: no module stands for the form.
        """
        build = self.proof.module
        if build is None:
            raise ValueError(f"{self.name}: no module stands for this form")
        with torch.device(self.proof.device):
            op, inputs = build(**arguments)
        # Checks call with positions, and some modules take names only.
        if isinstance(inputs, dict):
            return _CallByName(op, tuple(inputs)), tuple(inputs.values())
        return op, inputs

    def in_brief(self) -> Subject:
        """Return the same subject with small inputs only."""
        spec = self.spec and dataclasses.replace(self.spec, large=())
        return dataclasses.replace(self, spec=spec, brief=True)

    def with_variants(self) -> Subject:
        """Return the same subject, with the variants whose module holds the replacement."""
        built = tuple(filter(self._is_built, self.proof.variants))
        return dataclasses.replace(self, built=built)

    def _is_built(self, variant: str) -> bool:
        spec = self.proof
        # A module returns results, and never writes to arguments.
        if spec.module is None or spec.functional.mutates:
            return False
        # A device may lack the first dtype of the form, such as float64.
        dtypes = self.dtypes or spec.dtypes
        arguments = spec.arguments(variant, dtypes[0], spec.leads[1], spec.sizes[0])
        try:
            op, _ = self.build(arguments)
        except Exception:  # of the plugin's constructor: the checks fail with its words
            return True
        # A module may hold the op in another one.
        classes = [getattr(part, "op_class", None) for part in op.modules()]
        return self.replacement.cls in classes


class Noting(Protocol):
    """A watch of the lines that calls run."""

    @property
    def lines(self) -> ReachedLines | None:
        """The lines so far."""


@dataclass(frozen=True)
class Trial:
    """A subject in one variant and one dtype: the inputs and the implementations of a check.

    ``noted`` takes the watches of the check's calls, whose lines count even if the check fails.
    """

    subject: Subject
    variant: str = ""
    dtype: torch.dtype = torch.float32
    noted: list[Noting] = field(default_factory=list, compare=False)

    @property
    def spec(self) -> OpSpec:
        """The spec of the form."""
        return self.subject.proof

    @property
    def form(self) -> Functional[..., Any]:
        """The functional form."""
        return self.spec.functional

    @property
    def is_built(self) -> bool:
        """True if a module of the replacement computes the variant."""
        return self.variant in self.subject.built

    @property
    def calls(self) -> list[checks.Implementation]:
        """The plugin's implementations: the form with the plugin's function, and the module."""
        found: list[checks.Implementation] = []
        if self.subject.function is not None:
            found.append(self.form)
        if self.is_built:
            found.append(checks.by_module(self.spec))
        return found

    def arguments(
        self, lead: tuple[int, ...], size: int, dtype: torch.dtype | None = None
    ) -> Arguments:
        """Draw arguments of a shape, by default in the dtype of the trial."""
        return self.spec.arguments(self.variant, dtype or self.dtype, lead, size)

    def small(self, dtype: torch.dtype | None = None) -> Arguments:
        """Draw small arguments, by default in the dtype of the trial."""
        return checks.small_arguments(self.spec, self.variant, dtype or self.dtype)

    def build_small(self) -> tuple[nn.Module, tuple[Any, ...]]:
        """Build the module for small arguments; return the module and the inputs of a call."""
        return self.subject.build(self.small())


class _CallByName(nn.Module):
    """Calls an op by the names of the arguments."""

    def __init__(self, op: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.op = op
        self.names = names

    def forward(self, *inputs: Any) -> Any:
        """Call the op."""
        named = dict(zip(self.names, inputs, strict=True))
        return self.op(**named)


def subjects_of(
    plugin: str, *, brief: bool = False, record: ShapeRecord | None = None
) -> list[Subject]:
    """List the subjects of a loaded plugin, in the order of the declared replacements.

    Args:
        plugin: the name of the entry point or of the distribution.
        brief: leave out inputs of realistic sizes.
        record: calls of real models to replay.
    """
    provider, names, _ = names_of(plugin)
    if provider == HOST_DISTRIBUTION:
        replacements = list(_own_kernels())
    else:
        replacements = [each for each in host_state().active if each.plugin in names]
    found: dict[str, Subject] = {}
    for replacement in replacements:
        if replacement.target is None:
            continue
        for subject in _subjects(replacement):
            # Two replacements may serve one form: the first one is judged.
            found.setdefault(subject.name, dataclasses.replace(subject, record=record))
    return [subject.in_brief() if brief else subject for subject in found.values()]


def _own_kernels() -> Iterator[Replacement]:
    """Yield the classes of the catalogue with a kernel for this platform, as replacements."""
    for target in host_state().registry.targets():
        if issubclass(target, PluggableClass):
            continue
        binding = bind(target)
        # Classes of plugins are judged with the plugin.
        is_replaced = binding.replacement.cls is not target
        if is_replaced or binding.kernel.winner.key in ("native", "forward"):
            continue
        yield Replacement(target, target.__qualname__, target, binding.provider)


def _subjects(replacement: Replacement) -> Iterator[Subject]:
    """Yield the forms of a replacement, or the op itself if the replacement computes no form."""
    target: Any = replacement.target
    name = op_name_of(target, host_state()) or target.__qualname__
    forms = [] if issubclass(target, PluggableClass) else inventory.functionals_of(target)
    served = []
    # A form counts if the plugin computes the form in some variant.
    for form in forms:
        subject = _subject_of_form(form, name, replacement)
        if subject is not None and subject.variants:
            served.append(subject)
    yield from served or [Subject(_shown(target, name), name, replacement)]


def _subject_of_form(
    form: Functional[..., Any], op: str, replacement: Replacement
) -> Subject | None:
    """Return the subject for a form; ``None`` without a spec, or for a form of another class."""
    spec = SPECS.get(form.name)
    if spec is None or replacement.target is not host_state().registry.find_target(form.op):
        return None
    function = binding_of(form).kernel.winner.functional(form.name)
    # Inputs must be where the kernel runs.
    placed = dataclasses.replace(spec, device=current_platform().device_type)
    return Subject(form.name, op, replacement, placed, function).with_variants()


def _shown(target: type, op: str) -> str:
    """Return the name of an op or class; the class name for a variant of a registered op."""
    record = host_state().registry.records().get(op)
    is_registered = record is not None and record.cls is target
    return op if is_registered else target.__qualname__


def claimed_dtypes(platform: Platform) -> tuple[torch.dtype, ...]:
    """Return the floating-point dtypes of the first device of a platform."""
    return tuple(platform.capability().dtypes)
