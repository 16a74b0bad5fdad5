"""Reading the properties of a platform once, and guarding its methods, for the whole process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

from opgraft.base.text import described
from opgraft.platform import Platform
from opgraft.plugins.guarded_methods import expect_plain, guard_methods
from opgraft.registry.decision import Provider

PROPERTIES = tuple(name for name, value in vars(Platform).items() if isinstance(value, property))
"""The names of all properties that a platform has."""

_WITHOUT_VALUES = "meta"
"""The device type of tensors that have a shape and hold no numbers."""


def keep_properties(platform: Platform, entry: str, provider: Provider) -> None:
    """Read and check every property of a platform, and keep the value for later answers.

    A property is code of others: a second read may raise, or give another value. Each value is
    kept before the next property is read, as one property may be computed from another. The
    methods are guarded, as ``guard_methods`` says.

    Args:
        platform: as it was constructed.
        entry: the name of its entry point.
        provider: the distribution of the platform.

    Raises:
        TypeError, ValueError: a property raised, or has a value that no platform may have.
    """
    # A class of its own: other objects of the platform's class stay as they are.
    cls = type(platform)
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    metaclass: Any = type(cls)
    keeping = metaclass(cls.__name__, (cls,), names)
    # By object's own way, as a platform may refuse that its attributes are set.
    object.__setattr__(platform, "__class__", keeping)
    for name in PROPERTIES:
        value = checked(name, _read(platform, name))
        type.__setattr__(keeping, name, value)
    guard_methods(keeping, cls, entry, provider)


def checked(name: str, value: Any) -> Any:
    """Return the value to keep of a property.

    Raises:
        TypeError, ValueError: no platform may have the value.
    """
    return _CHECKS[name](name, value)


def _read(platform: Platform, name: str) -> Any:
    try:
        return expect_plain(getattr(platform, name))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ValueError(f"its property {name} raised {described(error)}") from error


def _expect_text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _unexpected(name, value, "a string that is not empty")
    return str.__str__(value)


def _text_or_none(name: str, value: Any) -> str | None:
    return None if value is None else _expect_text(name, value)


def _device_type(name: str, value: Any) -> str:
    device = _expect_text(name, value)
    if device == _WITHOUT_VALUES:
        raise ValueError(f"its {name} is {device!r}, whose tensors hold no numbers to compute with")
    if ":" in device:
        kind = device.partition(":")[0]
        raise ValueError(f"its {name} is {device!r}, which names one device: use {kind!r}")
    return device


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Collection):
        raise _unexpected(name, value, "a tuple of strings")
    return tuple(_expect_text(f"entry of {name}", each) for each in value)


def _packages(name: str, value: Any) -> Mapping[str, Collection[str]]:
    if not isinstance(value, Mapping):
        raise _unexpected(name, value, "a mapping from distributions to names of ops")
    rows = dict(value)
    return MappingProxyType(
        {_expect_text(f"key of {name}", key): _texts(f"{name}[{key!r}]", rows[key]) for key in rows}
    )


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _unexpected(name, value, "True or False")
    return value


def _class_or_none(name: str, value: Any) -> Any:
    if value is not None and not callable(value):
        raise _unexpected(name, value, "a class or None")
    return value


def _anything(name: str, value: Any) -> Any:
    return value


def _unexpected(name: str, value: Any, expected: str) -> TypeError:
    kind = "None" if value is None else f"a {type(value).__name__}"
    return TypeError(f"its {name} is {kind}, expected {expected}")


_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "name": _expect_text,
    "device_type": _device_type,
    "dispatch_chain": _texts,
    "runs_cpu_kernels": _flag,
    "distributed_backend": _expect_text,
    "compile_backend": _expect_text,
    "visibility_variable": _text_or_none,
    "ray_device_key": _text_or_none,
    "graph_class": _class_or_none,
    "streams": _anything,
    "kernel_packages": _packages,
}
"""By property, the function that checks its value and returns the value to keep."""
