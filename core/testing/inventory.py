"""The inventory of each op: its kernels on every installed platform, its functional forms, and what was proved of them.

The kernels are those that classes declare. Whether this machine could run them is another question, which the op's
decision answers for the platform of the process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Any

from opgraft import functional
from opgraft.base.text import described
from opgraft.binding.custom_op import PluggableLayer
from opgraft.binding.functional import FUNCTIONALS, Functional, binding_of
from opgraft.binding.kernels import declared_kernels
from opgraft.binding.names import kin_of, op_name_of
from opgraft.binding.pluggable_class import PluggableClass, choose_class
from opgraft.binding.specialisation import bind
from opgraft.config import Settings
from opgraft.errors import ConfigError, ConflictError
from opgraft.platform import Platform, PlatformSpec, effective_chain
from opgraft.plugins.discovery import PLATFORM_GROUP, PLUGIN_GROUP, Offer, discover, normalized
from opgraft.plugins.outcomes import absence_of
from opgraft.plugins.requirements import objection
from opgraft.plugins.selection import current_platform
from opgraft.registry.choice import ReplacementChoice, choose_replacement
from opgraft.registry.decision import Decision, Provider
from opgraft.registry.declarations import Replacement
from opgraft.registry.op_classes import location_of
from opgraft.registry.state import PluginStatus, host_state
from opgraft.testing import proof_records

CONFLICT = "conflict"


@dataclass(frozen=True)
class DeclaredPlatform:
    """An installed platform as its class declares it, without a device.

    Attributes:
        name: the name of its entry point.
        platform: ``None`` where its class cannot be asked without a device, or replacements that it comes with are
            declared only where it is the platform of the process.
        chain: its dispatch chain.
        unknown: why there is no platform.
    """

    name: str
    platform: Platform | None = None
    chain: tuple[str, ...] = ()
    unknown: str = ""


def declared_platforms() -> list[DeclaredPlatform]:
    """Return the built-in platforms, and those of plugins that the settings admit, in the order of their names."""
    settings = host_state().settings()
    offers = [
        offer for offer in discover().of_group(PLATFORM_GROUP) if not objection(offer, settings)
    ]
    return [
        _declared(offer)
        for offer in sorted(offers, key=lambda offer: (not offer.built_in, offer.name))
    ]


def built_in_platforms() -> list[DeclaredPlatform]:
    """Return the platforms that opgraft itself offers."""
    offers = discover().of_group(PLATFORM_GROUP)
    return [
        _declared(offer) for offer in sorted(offers, key=lambda offer: offer.name) if offer.built_in
    ]


def _declared(offer: Offer) -> DeclaredPlatform:
    current = current_platform()
    if offer.name == current.name:
        return DeclaredPlatform(offer.name, current, effective_chain(current))
    if not offer.built_in and not _plugins_loaded(offer):
        return DeclaredPlatform(
            offer.name, unknown=f"plugins of {offer.provider} are not active here"
        )
    try:
        spec: PlatformSpec = offer.load()
        cls = spec.load_class()
        # __init__ may need a runtime or a device that is not here; a chain that needs what it sets is unknown.
        platform = cls.__new__(cls)
        return DeclaredPlatform(offer.name, platform, effective_chain(platform))
    except (
        Exception,
        SystemExit,
    ) as error:  # a plugin's code, which was not made for a machine without its device
        return DeclaredPlatform(
            offer.name, unknown=f"its class cannot be asked: {described(error)}"
        )


def _plugins_loaded(offer: Offer) -> bool:
    records = host_state().plugins
    plugins = [
        plugin for plugin in discover().of_group(PLUGIN_GROUP) if plugin.provider == offer.provider
    ]
    return all(
        records[p.name].status is PluginStatus.ACTIVATED for p in plugins if p.name in records
    )


def kernel_keys(
    cls: type,
    platforms: Sequence[DeclaredPlatform],
    replacements: Sequence[Replacement] | None = None,
) -> dict[str, str | None]:
    """Give, by platform, the dispatch key of the kernel that constructing ``cls`` would bind; ``None``: unknown.

    Everything that a kernel or replacement needs counts as present. Where two replacements compete the key is
    ``CONFLICT``. ``replacements``: to choose from; all that are declared if not given.
    """
    known = _declared_replacements() if replacements is None else replacements
    settings = host_state().settings()
    return {
        p.name: _key(cls, p.platform, p.chain, known, settings) if p.platform else None
        for p in platforms
    }


def _declared_replacements() -> list[Replacement]:
    """List replacements of plugins that work, without their conditions, those for other platforms included."""
    state = host_state()
    declared = []
    for replacement in state.registry.replacements:
        record = state.plugins.get(replacement.plugin or "")
        if record is None or record.status not in (PluginStatus.FAILED, PluginStatus.VETOED):
            platforms = record.platforms if record else replacement.platforms
            declared.append(dataclasses.replace(replacement, when=None, platforms=platforms))
    return declared


def keys_in_words(keys: dict[str, str | None]) -> str:
    """Put what ``kernel_keys`` found in a line; ``?`` for what is not known here."""
    told = {key or "?" for key in keys.values()}
    if len(told) == 1:
        return f"{told.pop()} on every platform"
    return " ".join(f"{platform}={key or '?'}" for platform, key in keys.items())


def _key(
    cls: type,
    platform: Platform,
    chain: tuple[str, ...],
    replacements: Sequence[Replacement],
    settings: Settings,
) -> str | None:
    state = host_state()
    own = discover().provider_of(cls.__module__)
    try:
        choice = choose_replacement(
            cls,
            op_name_of(cls, state),
            own,
            replacements,
            platform,
            settings,
            kin_of(cls, replacements),
            absence_of,
        )
    except (
        ConflictError,
        ConfigError,
    ):  # the latter: providers asks for one that another platform has
        return CONFLICT
    kernels = declared_kernels(choice.cls, chain)
    return kernels[0].key if kernels else None


def functionals_of(cls: type) -> list[Functional[..., Any]]:
    """Return the functional forms of an op and of its variants, those without a spec of opgraft's own included."""
    state = host_state()
    name = op_name_of(cls, state)
    targets = ((form, state.registry.find_target(form.op)) for form in FUNCTIONALS.values())
    return [form for form, target in targets if target and op_name_of(target, state) == name]


@dataclass(frozen=True)
class KernelHere:
    """The result of constructing an op class here and now.

    Attributes:
        op_class: the class of the instance, a replacement perhaps.
        kernel: the class that defines the kernel and its method, such as ``RMSNorm.forward_native``.
        key: the dispatch key of the kernel.
        provider: who provides the kernel.
        enabled: whether ``custom_ops`` enables the op.
        reason: which kernels would come first and cannot run here, and why; ``None`` where there are none.
        error: why no choice can be made; the others are ``None`` then.
    """

    op_class: str | None = None
    kernel: str | None = None
    key: str | None = None
    provider: Provider | None = None
    enabled: bool | None = None
    reason: str | None = None
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain data, with the names that all JSON of opgraft has for it."""
        return {
            "class": self.op_class,
            "kernel": self.kernel,
            "key": self.key,
            "provider": self.provider.to_dict() if self.provider else None,
            "enabled": self.enabled,
            "reason": self.reason,
            "error": self.error,
        }


def choice_here(cls: type) -> ReplacementChoice:
    """Choose the class that constructing ``cls`` yields here and now, an op or not; raise as constructing does."""
    return choose_class(cls) if issubclass(cls, PluggableClass) else bind(cls).replacement


def decision_here(cls: type) -> Decision:
    """Explain what constructing ``cls`` yields here and now: class and kernel of an op, else the class."""
    return choose_class(cls).decision if issubclass(cls, PluggableClass) else bind(cls).decision


def kernel_here(cls: type) -> KernelHere:
    """Return the kernel that constructing ``cls`` binds here and now, or the conflict that prevents it."""
    try:
        binding = bind(cls)
    except ConflictError as error:
        return KernelHere(error=str(error))
    kernel = binding.kernel.winner
    name = binding.replacement.cls.__qualname__
    passed_over = "; ".join(
        f"{skipped} is not used: {why}" for skipped, why in binding.kernel.passed_over
    )
    return KernelHere(
        name, str(kernel), kernel.key, binding.provider, binding.kernel.enabled, passed_over or None
    )


def variants_of(cls: type) -> list[type]:
    """Return the classes that derive from a registered op in its package, and that its name switches too."""
    state = host_state()
    name = op_name_of(cls, state)
    base = state.registry.records()[name].cls if name else cls
    derived = [
        target
        for target in state.registry.targets()
        if target is not cls and issubclass(target, base)
    ]
    return [target for target in derived if op_name_of(target, state) == name]


def find_op(name: str) -> type | None:
    """Return the class that ``name`` stands for, an op or not, as any table or report of opgraft may show it.

    That is an op, a class, the method of a class, a functional form with or without its module, or a replacement,
    which stands for the class that it replaces.

    Raises:
        ConflictError: several op classes have that bare class name.
    """
    registry = host_state().registry
    owner, _, method = name.rpartition(".")
    bare = owner if method == "forward" or method.startswith("forward_") else name
    form = FUNCTIONALS.get(
        name.removeprefix("opgraft.functional.").removeprefix("torch.ops.opgraft.")
    )
    target = registry.find_target(bare)
    if target is None:
        shown = ((r.cls.__qualname__, r.cls.__module__, r.target) for r in registry.replacements)
        module, _, qualname = bare.rpartition(":")
        target = next(
            (t for cls, home, t in shown if cls == qualname and module in ("", home)), None
        )
    return registry.find_target(form.op) if target is None and form else target


def known_names() -> set[str]:
    """Return every bare name by which ``find_op`` finds something."""
    registry = host_state().registry
    return (
        registry.target_names()
        | set(FUNCTIONALS)
        | {r.cls.__qualname__ for r in registry.replacements if r.target}
    )


@dataclass(frozen=True)
class FormHere:
    """The function that a functional form of an op runs here and now.

    Attributes:
        name: of the form.
        call: the dotted path by which it is called.
        function: the dotted path of the function that an eager call runs where no gradient is required.
        location: where that function is defined, ``file:line``.
    """

    name: str
    call: str
    function: str
    location: str


def forms_here(cls: type) -> list[FormHere]:
    """List what each functional form of an op and of its variants runs here, save those that have a conflict."""
    found = []
    for form in functionals_of(cls):
        try:
            kernel = binding_of(form).kernel.winner
        except ConflictError:  # which the class of that form tells
            continue
        public = getattr(functional, form.name, None) is form
        call = f"opgraft.functional.{form.name}" if public else f"torch.ops.opgraft.{form.name}"
        function: Any = kernel.functional(form.name) or form.native
        path = f"{function.__module__}.{function.__qualname__}"
        found.append(FormHere(form.name, call, path, location_of(function)))
    return found


def proofs_of(forms: Sequence[Functional[..., Any]]) -> dict[str, dict[str, Any]]:
    """Tell, by form, what was proved of it and whether that is about what is installed."""
    records = proof_records.recorded()
    proved = {
        form.name: dataclasses.asdict(records[form.name]) if form.name in records else {}
        for form in forms
    }
    return {
        name: {"state": proof_records.state_of(name).name.lower(), **row}
        for name, row in proved.items()
    }


def proofs_in_words(cls: type, proved: dict[str, dict[str, Any]]) -> str:
    """Put what ``proofs_of`` found in one sentence: of checks and dtypes, those that all forms have in common."""
    if not proved:
        return "made of other ops" if issubclass(cls, PluggableLayer) else "no functional form"
    parts = []
    current = [row for row in proved.values() if row["state"] == "current"]
    if current:
        checks, dtypes = (
            set.intersection(*(set(row[column]) for row in current))
            for column in ("checks", "dtypes")
        )
        parts.append(
            f"native definition proved: {_count(current, 'form')}, {_count(checks, 'check')}, {_count(dtypes, 'dtype')}"
        )
        outside = dict.fromkeys(name for row in current for name in row["outside"])
        if outside:
            compared = sum(bool(row["outside"]) for row in current)
            some = f" {compared}" if compared < len(current) else ""
            parts[0] += f",{some} against {' and '.join(outside)}"
    for state in (proof_records.State.CHANGED, proof_records.State.MISSING):
        names = [name for name, row in proved.items() if row["state"] == state.name.lower()]
        if names:
            parts.append(f"{state.value}: {', '.join(names)}")
    return "; ".join(parts)


def _count(things: Sized, noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


def missing_packages(cls: type) -> list[str]:
    """List distributions with kernels of an op for the platform of this process that are not installed."""
    name = op_name_of(cls, host_state())
    installed = {normalized(offer.provider.name) for offer in discover().offers}
    packages = current_platform().kernel_packages
    return [
        package
        for package, ops in packages.items()
        if name in ops and normalized(package) not in installed
    ]
