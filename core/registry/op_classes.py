"""Read op classes: find definitions and their lines, and check replacements."""

from __future__ import annotations

import functools
import inspect
import itertools
import linecache
import re
import types
from collections.abc import Iterable, Iterator, Sequence, Set
from inspect import Parameter, Signature
from typing import Any

from opgraft.errors import RegistrationError, near_matches
from opgraft.platform import DISPATCH_KEYS
from opgraft.registry.recorded_calls import FORWARD, forms_called, recorded_calls
from opgraft.registry.signatures import (
    BY_POSITION,
    Calls,
    bound_call,
    calls_of,
    method_signature,
    rejected_call,
)

NEEDS = "__opgraft_needs__"
"""The attribute of a kernel with the check of ``opgraft.needs``."""


def check_replacement(target: type, cls: type) -> tuple[str, ...]:
    """Check a replacement of ``target``.

    Returns:
        Findings about the replacement that make no known call fail.

    Raises:
        RegistrationError: ``cls`` is no subclass, overrides nothing, or has an async method. Or a
            call by callers of the target would fail: a call of an op's constructor, of ``forward``
            or of a kernel; for other classes, a call of any method.
    """
    if cls is target:
        raise RegistrationError(
            f"{qualified(cls)} at {location_of(cls)} is declared to replace itself: name the op "
            "class it stands in for"
        )
    is_op = isinstance(target, type) and any("__op_base__" in vars(b) for b in target.__mro__)
    if not is_op:
        raise RegistrationError(
            f"{qualified(cls)} at {location_of(cls)} is declared for {target!r}, which is no "
            "opgraft.CustomOp: only ops, and classes that derive from opgraft.PluggableClass, have "
            "their class chosen at construction. graft() turns a model's modules into ops first."
        )
    if not issubclass(cls, target):
        raise RegistrationError(
            f"{qualified(cls)} at {location_of(cls)} cannot replace {qualified(target)}: it is not "
            "a subclass of it, so isinstance checks and inherited state would break. Derive it "
            f"from {target.__name__}."
        )
    return _findings(target, cls)


def _findings(target: type, cls: type) -> tuple[str, ...]:
    """Return the findings about a subclass of ``target``.

    Raises:
        RegistrationError: the subclass overrides nothing, has an async method, or refuses a call.
    """
    # Mixins of the replacement count too: a kernel may come from one.
    between = [base for base in own_classes(cls) if base not in target.__mro__]
    defined = {name for base in between for name in vars(base)}
    methods = [method for method in ("__init__", *called_methods(target)) if method in defined]
    for method in methods:
        _expect_plain(cls, method)
    narrower = [_narrowness(target, cls, method) for method in methods]
    unserved = _unserved_forms(target, between)
    found = (_without_effect(target, cls, defined), *narrower, *unserved)
    return tuple(finding for finding in found if finding)


def _expect_plain(cls: type, method: str) -> None:
    """Check a method: opgraft awaits no call, and a kernel returns its results at once.

    Raises:
        RegistrationError: the method is an ``async def``, or a kernel yields.
    """
    owner = definer(cls, method)
    if owner is None:
        return
    defined = vars(owner)[method]
    # A staticmethod or classmethod hides the kind of the function within.
    function = getattr(defined, "__func__", defined)
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise RegistrationError(
            f"{owner.__qualname__}.{method} at {location_of(defined)} is an async function, and "
            "nobody awaits its result: write a plain def"
        )
    is_kernel = method == "forward" or method.startswith("forward_")
    if is_kernel and inspect.isgeneratorfunction(function):
        raise RegistrationError(
            f"{owner.__qualname__}.{method} at {location_of(defined)} yields, and a call would "
            "give a generator in place of tensors: return the results"
        )


def _unserved_forms(target: type, between: Sequence[type]) -> Iterator[str]:
    """Describe each form of ``target`` without a function of the replacement.

    Only forms that layers of opgraft call count.

    Args:
        target: the op.
        between: the classes of the replacement, down to the target.
    """
    forms = forms_called(target)
    if not forms:
        return
    # The native definition runs in a form in any case.
    methods = [method for method in kernel_methods() if method != "forward_native"]
    for base, method in itertools.product(between, methods):
        if method not in vars(base):
            continue
        functions = vars(base).get(f"functional_{method.removeprefix('forward_')}", {})
        for name in forms:
            if not _brings(functions, name):
                yield (
                    f"{base.__qualname__}.{method} at {location_of(vars(base)[method])} never runs "
                    f"in layers that call opgraft.functional.{name}, such as those of the engine. "
                    f"They run the native definition, as {base.__qualname__} brings no function "
                    "for that form. Bring one by functional_oot = "
                    f"opgraft.FunctionalKernels({{{name!r}: ...}})."
                )


def _brings(functions: Any, form: str) -> bool:
    try:
        return form in functions
    # The module of the functions cannot be imported: another check reports that.
    except Exception:
        return True


def _narrowness(target: type, cls: type, method: str) -> str | None:
    """Describe the first call that ``target`` accepts and ``cls.method`` refuses.

    ``None`` if there is no such call.

    Raises:
        RegistrationError: callers of the target make such a call.
    """
    owner = definer(cls, method, above=target)
    # The replacement inherits the method.
    if owner is None:
        return None
    _require_callable(owner, method)
    # A kernel of the replacement is compared with the native definition, which every op has.
    native = method if method == "__init__" else reference_method(target) or method
    reference = method if definer(target, method) is not None else native
    accepted = method_signature(target, reference)
    offered = method_signature(cls, method)
    # Models give the only argument of opgraft's ops by position, under any name.
    if method in kernel_methods() and recorded_calls(target, FORWARD):
        accepted = _one_by_position(accepted)
    problem = rejected_call(accepted, offered)
    if not problem:
        return None
    fails = None
    # A refused call fails only if opgraft may bind the method. Otherwise it is a finding.
    if _may_be_bound(cls, owner, method):
        fails = _failing_call(target, native, accepted, offered)
    place = location_of(vars(owner)[method])
    reference_place = _place_of_method(target, reference)
    text = (
        f"{owner.__qualname__}.{method} at {place} is narrower than "
        f"{target.__qualname__}.{reference} at {reference_place}: {fails or problem}. "
        f"Accept every call that {target.__name__} accepts; further parameters must be optional."
    )
    if fails:
        raise RegistrationError(text)
    return f"{text} No caller in opgraft makes that call."


def _require_callable(owner: type, method: str) -> None:
    """Raise a ``RegistrationError`` if an attribute has a method's name and cannot be called."""
    value = vars(owner)[method]
    if callable(value) or isinstance(value, (classmethod, functools.partialmethod)):
        return
    raise RegistrationError(
        f"{owner.__qualname__}.{method} of the class at {location_of(owner)} is no method but "
        f"{type(value).__name__}, and opgraft would call it: define a method, or remove the name."
    )


def _one_by_position(signature: Signature) -> Signature:
    """Return a signature without a name for the only parameter."""
    parameters = list(signature.parameters.values())
    if len(parameters) != 1 or parameters[0].kind is not Parameter.POSITIONAL_OR_KEYWORD:
        return signature
    return signature.replace(parameters=[parameters[0].replace(kind=Parameter.POSITIONAL_ONLY)])


def _failing_call(target: type, method: str, accepted: Signature, offered: Signature) -> str | None:
    """Describe the first call that callers of ``target`` make and ``offered`` refuses.

    Most calls of opgraft's own classes are recorded. Other calls of these classes give required
    arguments by position. Callers of other classes may make every call that ``accepted`` and
    ``called_with`` allow.

    Args:
        target: the class to replace.
        method: the constructor, a method, or the reference method of an op.
        accepted: the signature of the target.
        offered: the signature of the replacement.
    """
    if _is_op(target) and method != "__init__":
        # Nobody calls such a layer. Others read its weights.
        if not getattr(target, "called", True):
            return None
        recorded = recorded_calls(target, FORWARD)
    else:
        recorded = recorded_calls(target, method)
    stated = calls_of(target, method)
    if recorded is None and target.__module__.startswith("opgraft."):
        return _failing_call_of_opgraft(stated.narrowed(accepted), offered)
    if recorded is None:
        return rejected_call(stated.narrowed(accepted), offered)
    for call in recorded:
        if set(call.keywords) & set(stated.never):
            continue
        failure = call.failure(accepted, offered)
        if failure:
            return failure
    return None


def _failing_call_of_opgraft(accepted: Signature, offered: Signature) -> str | None:
    """Describe the first call that opgraft may make and ``offered`` refuses.

    Required arguments are given by position, so they may have other names.
    """
    required = [p for p in accepted.parameters.values() if p.default is Parameter.empty]
    names = [p.name for p in required if p.kind in BY_POSITION]
    keywords = [p.name for p in required if p.kind is Parameter.KEYWORD_ONLY]
    exchanged = bound_call(names, keywords, accepted, offered)
    # rejected_call() alone ignores names by position, so it misses two that changed places.
    return exchanged or rejected_call(Calls(by_position=names).narrowed(accepted), offered)


def _place_of_method(cls: type, method: str) -> str:
    """Return ``file:line`` of a method; of the class, if only a base outside of opgraft has it."""
    owner = definer(cls, method)
    return location_of(vars(owner)[method] if owner else cls)


def _may_be_bound(cls: type, owner: type, method: str) -> bool:
    """Return True if a call of the op can reach ``method`` of the class ``owner``.

    A ``forward`` hides other kernels of the same class and of the classes above. A ``forward_oot``
    without needs does so too. A disabled op runs ``forward_native`` in any case.
    """
    if method not in kernel_methods() or method in ("forward_native", "forward"):
        return True
    # Classes more derived than the owner may hide the method, and so may the owner itself.
    between = own_classes(cls)
    for base in between[: between.index(owner) + 1]:
        if "forward" in vars(base):
            return False
        if method != "forward_oot" and "forward_oot" in vars(base):
            return hasattr(vars(base)["forward_oot"], NEEDS)
    return True


_KERNEL_CUTOFF = 0.915
"""The least similarity of a misspelt name: 'forward_npu' and 'forward_cpu', at 0.909, differ."""


def _suggestion(name: str) -> str:
    """Return a hint for a method with a name like a kernel's."""
    near = near_matches(name, kernel_methods(), _KERNEL_CUTOFF)
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    return (
        "no dispatch key has that name, and a kernel for a device of your own is called "
        "'forward_oot'."
    )


_SET_BY_OPGRAFT = frozenset({"op_class", "_overrides_helpers"})
"""Attributes that ``CustomOp`` sets in every subclass: no definitions of a replacement."""


def _without_effect(target: type, cls: type, defined: Set[str]) -> str | None:
    """Describe a replacement that overrides nothing of ``target``; ``None`` for any other.

    Args:
        target: the op.
        cls: the replacement.
        defined: the names that the replacement defines.

    Raises:
        RegistrationError: the replacement is empty, or has a name like a misspelt kernel's.
    """
    plain = {name for name in defined - _SET_BY_OPGRAFT if not name.startswith("__")}
    has_effect = {"__init__", "__new__", "__call__", *kernel_methods()}
    # Any attribute of the target may be used by its methods.
    if defined & has_effect or any(hasattr(target, name) for name in plain):
        return None
    near = {name: _suggestion(name) for name in sorted(plain) if name.startswith("forward_")}
    hint = "".join(f" It defines {name}: {suggestion}" for name, suggestion in near.items())
    text = (
        f"{qualified(cls)} at {location_of(cls)} overrides nothing of {target.__qualname__}, so "
        f"replacing would change nothing.{hint} Define {_meant(target)}; a mixin that brings it "
        f"stands before {target.__name__} in the bases."
    )
    if near or not plain:
        raise RegistrationError(text)
    return f"{text} No op calls {', '.join(sorted(plain))}."


def _meant(target: type) -> str:
    if _is_op(target):
        return "forward_oot, or another forward_<key>"
    called = called_methods(target)
    return f"one of {', '.join(called)}" if called else "__init__"


def _is_op(target: type) -> bool:
    return reference_method(target) is not None


def called_methods(target: type) -> Sequence[str]:
    """List the methods that callers may call: an op's kernels; another class's public methods."""
    if _is_op(target):
        return kernel_methods()
    functions = (types.FunctionType, classmethod, staticmethod)
    found: dict[str, object] = {}
    for base in own_classes(target):
        found.update(vars(base))
    called = []
    for name, value in found.items():
        is_public = not name.startswith("_") or name == "__call__"
        if is_public and isinstance(value, functions):
            called.append(name)
    return sorted(called)


def kernel_methods() -> tuple[str, ...]:
    """Return the names of all kernels: ``forward``, ``forward_oot`` and so on."""
    return ("forward", *(f"forward_{key}" for key in DISPATCH_KEYS))


def reference_method(target: type) -> str | None:
    """Return the method with the signature of the op: ``forward_native``, else ``forward``."""
    return next((name for name in ("forward_native", "forward") if definer(target, name)), None)


def own_classes(cls: type) -> list[type]:
    """Return the classes of the MRO below the base of all ops, the most derived first.

    Only these classes may define kernels.
    """
    own = []
    for base in cls.__mro__:
        # Not getattr: every op inherits the mark.
        if "__op_base__" in vars(base):
            break
        own.append(base)
    return own


def location_of(thing: object) -> str:
    """Return ``file:line`` of a class or function, below decorators.

    Without a source, the name of the module is returned.
    """
    source: Any = thing
    try:
        return _kept_location(source)
    # A callable object of a plugin may have no hash.
    except TypeError:
        return _location(source)


def _location(thing: Any) -> str:
    if isinstance(thing, (staticmethod, classmethod)):
        thing = thing.__func__
    # A decorator that keeps the function as __wrapped__ is no place of interest.
    innermost = inspect.unwrap(thing) if callable(thing) else thing
    code = getattr(innermost, "__code__", None)
    if code is not None:
        line = _line_of_name(code.co_filename, code.co_firstlineno, code.co_name)
        return f"{code.co_filename}:{line}"
    try:
        file = inspect.getsourcefile(thing) or ""
        return f"{file}:{_line_of_class(file, thing)}"
    except (OSError, TypeError):
        return str(getattr(thing, "__module__", "unknown"))


_kept_location = functools.lru_cache(maxsize=1024)(_location)
"""A cache: to find a class in the source reads the whole file."""


def _line_of_class(file: str, cls: type) -> int:
    """Return the line of the ``class`` statement."""
    first_lines = []
    for value in vars(cls).values():
        if not isinstance(value, types.FunctionType) or value.__code__.co_filename != file:
            continue
        # A function that was put into the class later may stand above the statement.
        if value.__qualname__ == f"{cls.__qualname__}.{value.__name__}":
            first_lines.append(value.__code__.co_firstlineno)
    first = min(first_lines, default=0)
    above = [line for line in _lines_of_name(file, 1, cls.__name__) if line < first]
    if len(above) == 1:
        return above[0]
    # Several statements above have the name. Python parses the file, which takes milliseconds.
    return _line_of_name(file, inspect.getsourcelines(cls)[1], cls.__name__)


def _line_of_name(file: str, first: int, name: str) -> int:
    """Return the line of the ``def`` or ``class`` of ``name``. Decorators begin at ``first``."""
    return next(iter(_lines_of_name(file, first, name)), first)


def _lines_of_name(file: str, first: int, name: str) -> list[int]:
    statement = re.compile(rf"\s*(async\s+def|def|class)\s+{re.escape(name)}\b")
    lines = linecache.getlines(file)[first - 1 :]
    return [first + index for index, line in enumerate(lines) if statement.match(line)]


def definer(cls: type, name: str, above: type | None = None) -> type | None:
    """Return the most derived class with a definition of ``name``, or ``None``.

    The search walks the MRO of ``cls``, and ends at the class ``above`` if given.
    """
    for base in own_classes(cls):
        if base is above:
            return None
        if name in vars(base):
            return base
    return None


def told_apart(cls: type, others: Iterable[type]) -> str:
    """Return the name of a class, with the module if one of ``others`` has the same name."""
    alike = any(other is not cls and other.__qualname__ == cls.__qualname__ for other in others)
    return qualified(cls) if alike else cls.__qualname__


def qualified(cls: Any) -> str:
    """Return ``module:Class``, the name of a class in settings and plugins."""
    return f"{cls.__module__}:{cls.__qualname__}"
