"""What op classes define, where, and whether one may replace another."""

from __future__ import annotations

import inspect

from opgraft.errors import RegistrationError
from opgraft.platform import DISPATCH_KEYS
from opgraft.signatures import method_signature, rejected_call


def check_replacement(target: type, cls: type) -> None:
    """Reject a replacement that could not stand in for ``target``.

    Raises:
        RegistrationError: not a subclass, or its constructor, ``forward`` or a kernel is narrower than the target's.
    """
    if cls is target:
        raise RegistrationError(
            f"{qualified(cls)} at {location_of(cls)} is declared to replace itself: name the op class it stands in for"
        )
    if not issubclass(cls, target):
        raise RegistrationError(
            f"{qualified(cls)} at {location_of(cls)} cannot replace {qualified(target)}: it is not a subclass of it, "
            f"so isinstance checks and inherited state would break. Derive it from {target.__name__}."
        )
    forward = reference_method(target)
    for name, counterpart in [("__init__", "__init__"), *((method, forward) for method in kernel_methods())]:
        owner = definer(cls, name, above=target)
        if owner is None or counterpart is None:
            continue
        reference = name if definer(target, name) is not None else counterpart
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
    return next((name for name in ("forward_native", "forward") if definer(target, name)), None)


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


def definer(cls: type, name: str, above: type | None = None) -> type | None:
    """The class that defines ``name`` for ``cls``, looking only above ``above`` in the MRO."""
    for base in own_classes(cls):
        if base is above:
            return None
        if name in vars(base):
            return base
    return None


def qualified(cls: type) -> str:
    """``module:Class``, as settings and plugins name a class."""
    return f"{cls.__module__}:{cls.__qualname__}"
