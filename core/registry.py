"""What has been declared: op classes by name, and replacements by target.

Declarations outlive ``reset()``. Which replacements are active in this process is the state's concern.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from opgraft.decision import Provider
from opgraft.errors import ConflictError, RegistrationError, UnknownTargetError, close_matches
from opgraft.platform import DISPATCH_KEYS, Platform
from opgraft.signatures import method_signature, rejected_call

ANY_PLATFORM = "any"


@dataclass(frozen=True)
class OpRecord:
    """An op class under its registered name."""

    name: str
    cls: type
    provider: Provider


@dataclass(eq=False)
class Replacement:
    """A class declared to be constructed in place of ``target``.

    Attributes:
        asked_for: the target as the plugin named it; ``target`` is ``None`` while that name is pending.
        provider: who declares it.
        plugin: entry-point name of the plugin that declared it, ``None`` outside of plugins.
        platforms: names of the platforms it applies on, or ``("any",)``.
        priority: the highest one wins among replacements of one target.
        when: narrows it further; called with the platform.
    """

    cls: type
    asked_for: str
    target: type | None
    provider: Provider
    plugin: str | None = None
    platforms: tuple[str, ...] = (ANY_PLATFORM,)
    priority: int = 0
    when: Callable[[Platform], bool] | None = None

    @property
    def location(self) -> str:
        return location_of(self.cls)


@dataclass
class Registry:
    """All declarations of the process."""

    ops: dict[str, OpRecord] = field(default_factory=dict)
    replacements: list[Replacement] = field(default_factory=list)

    def add_op(self, name: str, cls: type, provider: Provider) -> None:
        """Declare an op class. The same class again is a no-op, a reloaded definition of it takes its place.

        Raises:
            ConflictError: another class holds the name.
        """
        known = self.ops.get(name)
        if known is not None and not _same_definition(known.cls, cls):
            raise ConflictError(
                f"op name {name!r} is registered twice: by {_qualified(known.cls)} at {location_of(known.cls)} "
                f"({known.provider}) and by {_qualified(cls)} at {location_of(cls)} ({provider}). Rename one of them."
            )
        self.ops[name] = OpRecord(name, cls, provider)

    def add_replacement(self, new: Replacement) -> Replacement:
        """Declare a replacement and return its record: the known one if the same class is declared again.

        Raises:
            RegistrationError: it is no subclass of its target, or is narrower than its target.
        """
        for index, known in enumerate(self.replacements):
            same_target = known.target is new.target if new.target else known.asked_for == new.asked_for
            if known.cls is new.cls and same_target:
                return known
            if same_target and _same_definition(known.cls, new.cls):
                del self.replacements[index]
                break
        if new.target is not None:
            check_replacement(new.target, new.cls)
        self.replacements.append(new)
        return new

    def settle_pending(self, replacement: Replacement) -> None:
        """Resolve the target of a pending replacement.

        Raises:
            UnknownTargetError: nothing answers to the name that it asked for.
            RegistrationError: the replacement does not fit its target.
        """
        if replacement.target is None:
            target = self.find_target(replacement.asked_for)
            if target is None:
                raise UnknownTargetError(
                    f"{_qualified(replacement.cls)} at {replacement.location} ({replacement.provider}) replaces "
                    f"{replacement.asked_for!r}, which no registered op answers to: "
                    f"{close_matches(replacement.asked_for, self.target_names())} "
                    "Name it by op name, class name, 'module:Class' or the class itself."
                )
            check_replacement(target, replacement.cls)
            replacement.target = target

    def find_target(self, name: str) -> type | None:
        """The op class called ``name``: an op name, a class name or ``module:Class``.

        A class that derives from a registered op in the op's own package, as a variant of it, is found too.

        Raises:
            ConflictError: several op classes have that bare class name.
        """
        if name in self.ops:
            return self.ops[name].cls
        module, _, qualname = name.rpartition(":")
        found = [cls for cls in self._targets() if cls.__qualname__ == qualname and module in ("", cls.__module__)]
        if len(found) > 1:
            choices = ", ".join(repr(_qualified(cls)) for cls in found)
            raise ConflictError(f"the class name {name!r} is ambiguous: name the target as one of {choices}")
        return next(iter(found), None)

    def target_names(self) -> set[str]:
        return set(self.ops) | {cls.__name__ for cls in self._targets()}

    def _targets(self) -> list[type]:
        """The registered op classes and their variants, each once."""
        replacements = {replacement.cls for replacement in self.replacements}
        return list(dict.fromkeys(cls for op in self.ops.values() for cls in _with_variants(op.cls, replacements)))


def check_replacement(target: type, cls: type) -> None:
    """Reject a replacement that could not stand in for ``target``.

    Raises:
        RegistrationError: not a subclass, or its constructor, ``forward`` or a kernel is narrower than the target's.
    """
    if cls is target:
        raise RegistrationError(
            f"{_qualified(cls)} at {location_of(cls)} is declared to replace itself: name the op class it stands in for"
        )
    if not issubclass(cls, target):
        raise RegistrationError(
            f"{_qualified(cls)} at {location_of(cls)} cannot replace {_qualified(target)}: it is not a subclass of it, "
            f"so isinstance checks and inherited state would break. Derive it from {target.__name__}."
        )
    forward = reference_method(target)
    for name, counterpart in [("__init__", "__init__"), *((method, forward) for method in kernel_methods())]:
        owner = _definer(cls, name, above=target)
        if owner is None or counterpart is None:
            continue
        reference = name if _definer(target, name) is not None else counterpart
        problem = rejected_call(method_signature(target, reference), method_signature(cls, name))
        if problem:
            raise RegistrationError(
                f"{owner.__qualname__}.{name} at {location_of(vars(owner)[name])} is narrower than "
                f"{target.__qualname__}.{reference} at {location_of(target)}: {problem}. "
                f"Accept every call that {target.__name__} accepts; further parameters must be optional."
            )


def kernel_methods() -> tuple[str, ...]:
    """The names of the methods that can be bound as an op's ``forward``."""
    return ("forward", *(f"forward_{key}" for key in DISPATCH_KEYS))


def reference_method(target: type) -> str | None:
    """The method whose signature states how the op is called: the native definition, else ``forward``."""
    return next((name for name in ("forward_native", "forward") if _definer(target, name)), None)


def own_classes(cls: type) -> list[type]:
    """The classes of the MRO that may define kernels: from ``cls`` down to the base of all ops, which is left out."""
    mro = cls.__mro__
    ends = [index for index, base in enumerate(mro) if "__op_base__" in vars(base)]
    return list(mro[: min(ends)]) if ends else list(mro)


def location_of(thing: object) -> str:
    """``file:line`` of a class or function, or its module where there is no source."""
    if isinstance(thing, (staticmethod, classmethod)):
        thing = thing.__func__
    code = getattr(inspect.unwrap(thing) if callable(thing) else thing, "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    try:
        file = inspect.getsourcefile(thing)  # type: ignore[arg-type]
        return f"{file}:{inspect.getsourcelines(thing)[1]}"  # type: ignore[arg-type]
    except (OSError, TypeError):
        return str(getattr(thing, "__module__", "unknown"))


def _definer(cls: type, name: str, above: type | None = None) -> type | None:
    """The class that defines ``name`` for ``cls``, looking only above ``above`` in the MRO."""
    for base in own_classes(cls):
        if base is above:
            return None
        if name in vars(base):
            return base
    return None


def _with_variants(cls: type, replacements: set[type]) -> Iterator[type]:
    """``cls`` and, in its package, what derives from it; neither replacements nor the classes that binding makes."""
    yield cls
    derived: type
    for derived in cls.__subclasses__():
        in_package = derived.__module__.partition(".")[0] == cls.__module__.partition(".")[0]
        if in_package and derived not in replacements and not vars(derived).get("__specialisation__"):
            yield from _with_variants(derived, replacements)


def _same_definition(one: type, other: type) -> bool:
    return one is other or _qualified(one) == _qualified(other)


def _qualified(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"
