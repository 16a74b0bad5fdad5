"""The inventory of each op: kernels on every installed platform, functional forms and proofs.

The kernels are those that classes declare. The op's decision answers whether this machine can run
a kernel, for the platform of the process.
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
from opgraft.binding.in_tree import idle_oot_classes
from opgraft.binding.kernels import declared_kernels
from opgraft.binding.names import op_name_of, other_replacements_of_op
from opgraft.binding.pluggable_class import PluggableClass, choose_class
from opgraft.binding.specialisation import bind
from opgraft.config import Settings
from opgraft.errors import ConfigError, ConflictError
from opgraft.platform import Platform, PlatformSpec, effective_chain
from opgraft.plugins.admission import objection
from opgraft.plugins.discovery import PLATFORM_GROUP, PLUGIN_GROUP, Offer, discover, normalized
from opgraft.plugins.outcomes import absence_of
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
        name: of the entry point.
        platform: ``None`` if the class cannot be asked without a device. ``None`` also if the
            replacements of the platform's distribution are declared only on that platform.
        chain: the dispatch chain.
        unknown: why there is no platform.
    """

    name: str
    platform: Platform | None = None
    chain: tuple[str, ...] = ()
    unknown: str = ""


def declared_platforms() -> list[DeclaredPlatform]:
    """Return the built-in platforms, then those of plugins that the settings admit, by name."""
    # A platform that the settings forbid is not loaded.
    settings = host_state().settings()
    offers = [
        offer for offer in discover().of_group(PLATFORM_GROUP) if not objection(offer, settings)
    ]
    offers.sort(key=lambda offer: (not offer.built_in, offer.name))
    return list(map(_declared, offers))


def built_in_platforms() -> list[DeclaredPlatform]:
    """Return the platforms of opgraft itself."""
    offers = [offer for offer in discover().of_group(PLATFORM_GROUP) if offer.built_in]
    offers.sort(key=lambda offer: offer.name)
    return list(map(_declared, offers))


def _declared(offer: Offer) -> DeclaredPlatform:
    current = current_platform()
    # The current platform has been constructed, with everything that __init__ sets.
    if offer.name == current.name:
        return DeclaredPlatform(offer.name, current, effective_chain(current))
    if not offer.built_in and not _plugins_loaded(offer):
        unknown = f"plugins of {offer.provider} are not active here"
        return DeclaredPlatform(offer.name, unknown=unknown)
    try:
        spec: PlatformSpec = offer.load()
        cls = spec.load_class()
        # __init__ may need a runtime or a device. A chain that needs __init__ is unknown.
        platform = cls.__new__(cls)
        return DeclaredPlatform(offer.name, platform, effective_chain(platform))
    except (Exception, SystemExit) as error:
        # Code of a plugin may fail on a machine without the device.
        unknown = f"its class cannot be asked: {described(error)}"
        return DeclaredPlatform(offer.name, unknown=unknown)


def _plugins_loaded(offer: Offer) -> bool:
    """Return True if all plugins of the platform's distribution are active."""
    records = host_state().plugins
    for plugin in discover().of_group(PLUGIN_GROUP):
        if plugin.provider != offer.provider or plugin.name not in records:
            continue
        if records[plugin.name].status is not PluginStatus.ACTIVATED:
            return False
    return True


def kernel_keys(
    cls: type,
    platforms: Sequence[DeclaredPlatform],
    replacements: Sequence[Replacement] | None = None,
) -> dict[str, str | None]:
    """Return the dispatch key of the kernel that constructing a class would bind, by platform.

    All needs of kernels and replacements count as met. The key is ``CONFLICT`` if two replacements
    compete, and ``None`` if unknown.

    Args:
        cls: the op class.
        platforms: to answer for.
        replacements: to choose from; by default all declared ones.
    """
    known = _declared_replacements() if replacements is None else replacements
    settings = host_state().settings()
    keys: dict[str, str | None] = {}
    for each in platforms:
        keys[each.name] = None
        if each.platform:
            keys[each.name] = _key(cls, each, each.platform, known, settings)
    return keys


def _declared_replacements() -> list[Replacement]:
    """List the replacements of working plugins for all platforms, without their conditions."""
    state = host_state()
    declared = []
    for replacement in state.registry.replacements:
        record = state.plugins.get(replacement.plugin or "")
        # Replacements of a failed plugin were taken back.
        if record and record.status in (PluginStatus.FAILED, PluginStatus.VETOED):
            continue
        # A plugin may be limited to platforms as a whole.
        platforms = record.platforms if record else replacement.platforms
        declared.append(dataclasses.replace(replacement, when=None, platforms=platforms))
    return declared


def keys_in_words(keys: dict[str, str | None]) -> str:
    """Return the result of ``kernel_keys`` in one line; ``?`` stands for an unknown key."""
    told = {key or "?" for key in keys.values()}
    # Most ops have the same key everywhere.
    if len(told) == 1:
        return f"{told.pop()} on every platform"
    return " ".join(f"{platform}={key or '?'}" for platform, key in keys.items())


def _key(
    cls: type,
    declared: DeclaredPlatform,
    platform: Platform,
    replacements: Sequence[Replacement],
    settings: Settings,
) -> str | None:
    try:
        choice = choose_replacement(
            cls,
            op_name=op_name_of(cls, host_state()),
            own=discover().provider_of(cls.__module__),
            active=replacements,
            platform=platform,
            settings=settings,
            other_replacements=other_replacements_of_op(cls, replacements),
            absence_of=absence_of,
        )
    except (ConflictError, ConfigError):
        # A ConfigError: providers asks for a replacement of another platform.
        return CONFLICT
    # A platform that was not constructed may have no name of its own.
    idle = idle_oot_classes(choice.cls, declared.name, replacements)
    # The most derived kernel of the chain comes first.
    for kernel in declared_kernels(choice.cls, declared.chain):
        if kernel.key != "oot" or kernel.owner not in idle:
            return kernel.key
    return None


def functionals_of(cls: type) -> list[Functional[..., Any]]:
    """Return the functional forms of an op and of its variants, with or without a spec."""
    state = host_state()
    name = op_name_of(cls, state)
    found = []
    for form in FUNCTIONALS.values():
        target = state.registry.find_target(form.op)
        if target and op_name_of(target, state) == name:
            found.append(form)
    return found


@dataclass(frozen=True)
class KernelHere:
    """The result of constructing an op class here and now.

    Attributes:
        op_class: the class of the instance, such as a replacement.
        kernel: the kernel's class and method, such as ``RMSNorm.forward_native``.
        key: the dispatch key of the kernel.
        provider: the provider of the kernel.
        enabled: True if ``custom_ops`` enables the op.
        reason: the kernels that would come first and cannot run here, and why; ``None`` if there
            are none.
        error: why no choice can be made; then the other attributes are ``None``.
    """

    op_class: str | None = None
    kernel: str | None = None
    key: str | None = None
    provider: Provider | None = None
    enabled: bool | None = None
    reason: str | None = None
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain data, with the names of all JSON of opgraft."""
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
    """Choose the class of an instance of ``cls`` here and now; raise as constructing does."""
    return choose_class(cls) if issubclass(cls, PluggableClass) else bind(cls).replacement


def decision_here(cls: type) -> Decision:
    """Return the decision about constructing ``cls``: the class, and an op's kernel."""
    return choose_class(cls).decision if issubclass(cls, PluggableClass) else bind(cls).decision


def kernel_here(cls: type) -> KernelHere:
    """Return the kernel that constructing ``cls`` binds here and now, or the conflict."""
    try:
        binding = bind(cls)
    except ConflictError as error:
        return KernelHere(error=str(error))
    choice = binding.kernel
    kernel = choice.winner
    name = binding.replacement.cls.__qualname__
    passed_over = [f"{skipped} is not used: {why}" for skipped, why in choice.passed_over]
    reason = "; ".join(passed_over) or None
    return KernelHere(name, str(kernel), kernel.key, binding.provider, choice.enabled, reason)


def variants_of(cls: type) -> list[type]:
    """Return the classes derived from a registered op that the op's name switches, too."""
    state = host_state()
    name = op_name_of(cls, state)
    base = state.registry.records()[name].cls if name else cls
    found = []
    for target in state.registry.targets():
        is_derived = target is not cls and issubclass(target, base)
        if is_derived and op_name_of(target, state) == name:
            found.append(target)
    return found


def find_op(name: str) -> type | None:
    """Return the class for a name in any table or report of opgraft, an op or not.

    The name may be that of an op, a class, a method of a class, a functional form with or without
    the module, or a replacement. A replacement stands for the replaced class.

    Raises:
        ConflictError: several op classes have the bare class name.
    """
    registry = host_state().registry
    owner, _, method = name.rpartition(".")
    is_method = method == "forward" or method.startswith("forward_")
    bare = owner if is_method else name
    target = registry.find_target(bare)
    if target is not None:
        return target
    module, _, qualname = bare.rpartition(":")
    for replacement in registry.replacements:
        cls = replacement.cls
        is_named = cls.__qualname__ == qualname and module in ("", cls.__module__)
        if is_named and replacement.target:
            return replacement.target
    # Tables show forms by the paths of their calls.
    short = name.removeprefix("opgraft.functional.").removeprefix("torch.ops.opgraft.")
    form = FUNCTIONALS.get(short)
    return registry.find_target(form.op) if form else None


def known_names() -> set[str]:
    """Return every bare name that ``find_op`` knows."""
    registry = host_state().registry
    replacements = {each.cls.__qualname__ for each in registry.replacements if each.target}
    return registry.target_names() | set(FUNCTIONALS) | replacements


@dataclass(frozen=True)
class FormHere:
    """The function that a functional form of an op runs here and now.

    Attributes:
        name: of the form.
        call: the dotted path of the form.
        function: the dotted path of the function that an eager call without gradients runs.
        location: of the function's definition, ``file:line``.
    """

    name: str
    call: str
    function: str
    location: str


def forms_here(cls: type) -> list[FormHere]:
    """List the functions for the functional forms of an op here; forms in conflict are left out."""
    found = []
    for form in functionals_of(cls):
        try:
            kernel = binding_of(form).kernel.winner
        except ConflictError:
            # The class of the form tells of the conflict.
            continue
        # A plugin's form is callable as a torch op only.
        public = getattr(functional, form.name, None) is form
        call = f"opgraft.functional.{form.name}" if public else f"torch.ops.opgraft.{form.name}"
        function: Any = kernel.functional(form.name) or form.native
        path = f"{function.__module__}.{function.__qualname__}"
        found.append(FormHere(form.name, call, path, location_of(function)))
    return found


def proofs_of(forms: Sequence[Functional[..., Any]]) -> dict[str, dict[str, Any]]:
    """Return the record of each form's proof, and the verdict on the installed code, by form."""
    records = proof_records.recorded()
    rows = {}
    for form in forms:
        row: dict[str, Any] = {"state": proof_records.state_of(form.name).name.lower()}
        if form.name in records:
            row |= dataclasses.asdict(records[form.name])
        rows[form.name] = row
    return rows


def proofs_in_words(cls: type, proved: dict[str, dict[str, Any]]) -> str:
    """Return the result of ``proofs_of`` in one sentence, with the checks of all forms together."""
    # Ops made of other ops have no form of their own.
    if not proved:
        return "made of other ops" if issubclass(cls, PluggableLayer) else "no functional form"
    parts = []
    current = [row for row in proved.values() if row["state"] == "current"]
    if current:
        parts.append(_proof_in_words(current))
    for state in (proof_records.State.CHANGED, proof_records.State.MISSING):
        names = [name for name, row in proved.items() if row["state"] == state.name.lower()]
        if names:
            parts.append(f"{state.value}: {', '.join(names)}")
    return "; ".join(parts)


def _proof_in_words(rows: list[dict[str, Any]]) -> str:
    """Describe proofs: the checks and dtypes that all forms have in common."""
    checks = set.intersection(*(set(row["checks"]) for row in rows))
    dtypes = set.intersection(*(set(row["dtypes"]) for row in rows))
    counts = _count(rows, "form"), _count(checks, "check"), _count(dtypes, "dtype")
    told = f"native definition proved: {', '.join(counts)}"
    outside = dict.fromkeys(name for row in rows for name in row["outside"])
    if not outside:
        return told
    compared = sum(bool(row["outside"]) for row in rows)
    some = f" {compared}" if compared < len(rows) else ""
    return f"{told},{some} against {' and '.join(outside)}"


def _count(things: Sized, noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


def missing_packages(cls: type) -> list[str]:
    """List distributions with kernels of an op for this platform that are not installed."""
    name = op_name_of(cls, host_state())
    installed = {normalized(offer.provider.name) for offer in discover().offers}
    missing = []
    for package, ops in current_platform().kernel_packages.items():
        if name in ops and normalized(package) not in installed:
            missing.append(package)
    return missing
