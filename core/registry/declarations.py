"""``Registry``: op classes by name, and replacements by target.

Declarations outlive ``reset()``. ``HostState`` knows the active replacements of this process.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from opgraft.errors import ConflictError, RegistrationError, UnknownTargetError, close_matches
from opgraft.platform import Platform
from opgraft.registry.conditions import Condition, objection_of
from opgraft.registry.decision import Provider
from opgraft.registry.op_classes import check_replacement, location_of, qualified

ANY_PLATFORM = "any"


@dataclass(frozen=True)
class OpRecord:
    """An op class under its registered name."""

    name: str
    cls: type
    provider: Provider


@dataclass(eq=False)
class Replacement:
    """The declaration of a class to construct in place of ``target``.

    Attributes:
        asked_for: the plugin's name for the target. ``target`` is ``None`` while no class has the
            name.
        provider: the distribution of the class.
        plugin: the plugin's entry-point name, ``None`` outside of plugins.
        platforms: names of the platforms for the class, or ``("any",)``.
        priority: the highest one wins among replacements of one target.
        when: a further condition, asked once for each platform.
        findings: questionable things that change no call.
        activation: the plugin's activation during the declaration, or ``None``.
    """

    cls: type
    asked_for: str
    target: type | None
    provider: Provider
    plugin: str | None = None
    platforms: tuple[str, ...] = (ANY_PLATFORM,)
    priority: int = 0
    when: Condition | None = None
    findings: tuple[str, ...] = ()
    activation: object = None
    _judged: tuple[Platform, str | None] | None = field(default=None, init=False, repr=False)

    def objection_on(self, platform: Platform) -> str | None:
        """Return the reason why the condition does not hold on a platform, ``None`` if it does.

        The condition is asked once per platform.
        """
        if self.when is None:
            return None
        # Kept per platform object, not for good: reset() may bring another platform.
        if self._judged is None or self._judged[0] is not platform:
            what = f"the when= condition of {self.cls.__qualname__} of {self.provider}"
            objection = objection_of(self.when, platform, what, self.provider)
            self._judged = (platform, objection)
        return self._judged[1]

    @property
    def location(self) -> str:
        return location_of(self.cls)

    def takes_over(self, known: Replacement) -> bool:
        """Return True if ``known``, for the same target, is an earlier definition of this class.

        A class inside a function is an earlier definition only if an earlier activation declared
        it: within one activation, the function may define several classes with different
        conditions.
        """
        if not redefines(known.cls, self.cls):
            return False
        if not _is_local(self.cls):
            return True
        return self.activation is not None and known.activation is not self.activation


@dataclass(frozen=True)
class Owner:
    """The plugin or platform of a declaration.

    Attributes:
        kind: ``"plugin"`` or ``"platform"``.
        name: the name of the entry point.
        provider: the distribution of the entry point.
    """

    kind: str
    name: str
    provider: Provider

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"


@dataclass
class Declaration:
    """A named declaration of an owner, such as an op. Leaving out the owner takes it back.

    Attributes:
        make: makes the declaration, and returns the undo. May be called again.
        take_back: the undo of the latest ``make``.
        holds: the declaration holds now.
    """

    make: Callable[[], Callable[[], None]]
    take_back: Callable[[], None]
    holds: bool = True

    def renew(self) -> None:
        """Make the declaration again, if it was taken back.

        Raises:
            ConflictError: somebody else has taken the name meanwhile.
        """
        if not self.holds:
            self.take_back = self.make()
            self.holds = True

    def withdraw(self) -> None:
        """Take the declaration back, if it holds."""
        if self.holds:
            self.take_back()
            self.holds = False


@dataclass
class Registry:
    """All declarations of the process.

    Attributes:
        ops: the op classes by name.
        classes: the other replaceable classes by name. No setting disables these.
        forms: the functional forms by name.
        replacements: the replacements of ops and classes.
        owned: by owner, the named declarations of plugins and platforms. These stay if the owner is
            left out: a module is imported once, and would not declare again.
        unapplied: by ``file:line`` of a ``register_oot`` without a class yet, the module.
    """

    ops: dict[str, OpRecord] = field(default_factory=dict)
    classes: dict[str, OpRecord] = field(default_factory=dict)
    forms: dict[str, Any] = field(default_factory=dict)
    replacements: list[Replacement] = field(default_factory=list)
    owned: dict[Owner, dict[str, Declaration]] = field(default_factory=dict)
    unapplied: dict[str, str] = field(default_factory=dict)

    def add_op(self, name: str, cls: type, provider: Provider) -> Callable[[], None]:
        """Declare an op class. A reloaded definition replaces the former one.

        Returns:
            The undo.

        Raises:
            ConflictError: another class holds the name.
        """
        return self._add(self.ops, name, cls, provider)

    def add_class(self, name: str, cls: type, provider: Provider) -> Callable[[], None]:
        """Declare a class that is no op, as ``add_op`` does an op."""
        return self._add(self.classes, name, cls, provider)

    def _add(
        self, records: dict[str, OpRecord], name: str, cls: type, provider: Provider
    ) -> Callable[[], None]:
        # Ops and classes share one space of names: ``providers`` may name both.
        known = self.ops.get(name) or self.classes.get(name)
        # The same module may come from another distribution. Its class must not take over unseen.
        is_again = known and redefines(known.cls, cls) and known.provider == provider
        if known is not None and not is_again:
            kind = "op" if records is self.ops else "class"
            raise ConflictError(
                f"{kind} name {name!r} is registered twice: by {qualified(known.cls)} at "
                f"{location_of(known.cls)} ({known.provider}) and by {qualified(cls)} at "
                f"{location_of(cls)} ({provider}). To replace the first, derive from it and "
                f"decorate with @{known.cls.__name__}.register_oot{_import_of(known.cls)} instead; "
                "otherwise rename one of them."
            )
        record = OpRecord(name, cls, provider)
        records[name] = record

        def remove() -> None:
            # A reloaded definition may hold the name by now.
            if records.get(name) is record:
                del records[name]

        return remove

    def records(self) -> dict[str, OpRecord]:
        """Return all named declarations: ops and other classes."""
        return {**self.ops, **self.classes}

    def named_by(self, field: str) -> dict[str, OpRecord]:
        """Return the declarations with names for a field of the settings.

        ``providers`` may name ops and classes by their registered names, and any other field ops
        only, by the names of their classes, too.
        """
        if field == "providers":
            return self.records()
        # Registered names come last, as they win over the same name of a class.
        return {**self.ops_by_class(), **self.ops}

    def ops_by_class(self) -> dict[str, OpRecord]:
        """Return ops by class name, such as ``RMSNorm``. Names of several classes are left out."""
        records = list(self.ops.values())
        counts = Counter(record.cls.__name__ for record in records)
        named = {record.cls.__name__: record for record in records}
        return {name: record for name, record in named.items() if counts[name] == 1}

    def ops_of_class(self, class_name: str) -> list[str]:
        """Return the registered names of the ops with a class of a name, sorted."""
        return sorted(name for name, op in self.ops.items() if op.cls.__name__ == class_name)

    def names_by_class(self) -> dict[str, str]:
        """Return the registered names of ops by class name."""
        # A class name that is also a registered name stands for the op of that name.
        named = self.ops_by_class().items()
        return {name: record.name for name, record in named if name not in self.ops}

    def add_replacement(self, new: Replacement) -> tuple[Replacement, Replacement | None]:
        """Declare a replacement.

        Returns:
            The record, and the former record that it replaces or ``None``. If the same class is
            declared again, the record is the known one.

        Raises:
            RegistrationError: the class is no subclass of the target, or fails in a call that
                callers of the target make.
        """
        former = None
        name = new.cls.__qualname__
        # A copy, as the loop removes the former record.
        for known in [each for each in self.replacements if each.cls.__qualname__ == name]:
            # A pending target is known by name only.
            same_target = (
                known.target is new.target if new.target else known.asked_for == new.asked_for
            )
            if known.cls is new.cls and same_target:
                return known, None
            if same_target and new.takes_over(known):
                self.replacements.remove(known)
                former = known
                break
        if new.target is not None:
            new.findings = self._check(new, new.target)
        self.replacements.append(new)
        return new, former

    def resolve_pending(self, replacement: Replacement) -> None:
        """Resolve the target of a pending replacement.

        Raises:
            UnknownTargetError: no class has the name.
            RegistrationError: the replacement does not fit the target.
        """
        if replacement.target is not None:
            return
        target = self.find_target(replacement.asked_for)
        if target is None:
            raise UnknownTargetError(
                f"{qualified(replacement.cls)} at {replacement.location} "
                f"({replacement.provider}) replaces {replacement.asked_for!r}, which no "
                "registered op answers to: "
                f"{close_matches(replacement.asked_for, self.target_names())} "
                "Name it by op name, class name, 'module:Class' or the class itself."
            )
        replacement.findings = self._check(replacement, target)
        # Set after the check, which may raise: a refused replacement stays pending.
        replacement.target = target

    def _check(self, replacement: Replacement, target: type) -> tuple[str, ...]:
        for known in self.replacements:
            if known.cls is not target or known.target is None:
                continue
            hidden = known.target.__qualname__
            raise RegistrationError(
                f"{qualified(replacement.cls)} at {replacement.location} is declared for "
                f"{qualified(target)}, which is itself a replacement of {hidden} and would hide "
                f"it: declare it for {hidden}, with a higher priority."
            )
        return check_replacement(target, replacement.cls)

    def find_target(self, name: str) -> type | None:
        """Return the op class called ``name``: an op name, a class name or ``module:Class``.

        Variants are found too: classes derived from a registered op in the op's own package.

        Raises:
            ConflictError: several op classes have the class name.
        """
        records = self.records()
        if name in records:
            return records[name].cls
        module, _, qualname = name.rpartition(":")
        # The module may be a package that exports a class of an inner module.
        named = [cls for cls in self.targets() if cls.__qualname__ == qualname]
        found = [cls for cls in named if module in ("", cls.__module__) or _exports(module, cls)]
        if len(found) > 1:
            choices = ", ".join(repr(qualified(cls)) for cls in found)
            raise ConflictError(
                f"the class name {name!r} is ambiguous: name the target as one of {choices}"
            )
        return next(iter(found), None)

    def target_names(self) -> set[str]:
        return set(self.records()) | {cls.__qualname__ for cls in self.targets()}

    def targets(self) -> list[type]:
        """Return the registered classes and their variants, each once."""
        replacements = {replacement.cls for replacement in self.replacements}
        found: list[type] = []
        for record in self.records().values():
            found += _with_variants(record.cls, replacements)
        # An op may derive from another op, and is then a variant of this one, too.
        return list(dict.fromkeys(found))


def _with_variants(cls: type, replacements: set[type]) -> Iterator[type]:
    """Yield ``cls`` and the classes derived from it in the same package.

    Replacements and specialisations are left out.
    """
    yield cls
    package = cls.__module__.partition(".")[0]
    derived: type
    for derived in cls.__subclasses__():
        # opgraft derives a class for each kernel that an op is bound to.
        is_made = vars(derived).get("__specialisation__") or derived in replacements
        if derived.__module__.partition(".")[0] == package and not is_made:
            yield from _with_variants(derived, replacements)


def _exports(module: str, cls: type) -> bool:
    """Return True if an imported module has the class as an attribute with the class's name."""
    return getattr(sys.modules.get(module), cls.__qualname__, None) is cls


def _import_of(cls: type) -> str:
    """Return the import of a class from the outermost package with the class, or an empty text."""
    package = ""
    for part in cls.__module__.split("."):
        package = f"{package}.{part}" if package else part
        if _exports(package, cls):
            return f" (from {package} import {cls.__name__})"
    return ""


def redefines(old: Any, new: Any) -> bool:
    """Return True if ``new`` is ``old``, or a later definition of it.

    A reloaded module, a notebook cell or a repeated call of a function defines a class again.
    """
    if old is new:
        return True
    if qualified(old) != qualified(new):
        return False
    # During a reload the name still leads to the old class, afterwards to the new one. If it leads
    # to a third class, two different classes share the name.
    bound = getattr(sys.modules.get(old.__module__), old.__qualname__, None)
    if bound in (old, new):
        return True
    # No module has a local class as an attribute. Two functions may define one of the same name.
    return _is_local(old) and location_of(old) == location_of(new)


def unapplied_at(location: str) -> str:
    """Return a sentence about a decorator without a class."""
    return (
        f"register_oot at {location} is applied to no class, so it registers nothing: write it as "
        "a decorator above the class, or give it the class"
    )


def _is_local(thing: Any) -> bool:
    return "<locals>" in thing.__qualname__
