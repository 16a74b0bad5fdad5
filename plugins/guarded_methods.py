"""Calls of a platform's methods. An error or a wrong result names the platform and the line."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from opgraft.base.text import described, printable
from opgraft.config.environment import PLATFORM, PLUGINS_DISABLE
from opgraft.errors import PluginError, raised_in
from opgraft.machine.evidence import MOST_DEVICES
from opgraft.platform import DeviceCapability, DeviceMemory
from opgraft.registry.decision import Provider
from opgraft.registry.op_classes import location_of
from opgraft.registry.watching import watching_code


def guard_methods(keeping: Any, cls: type, name: str, provider: Provider) -> None:
    """Give a class a guard around each method of a platform that opgraft calls while a model runs.

    A guarded method raises ``PluginError`` if the method raises or returns what no platform may.

    Args:
        keeping: the class that gets the guards, the only one that is derived from ``cls``.
        cls: the class of the platform.
        name: of the platform.
        provider: the distribution of the platform.
    """
    for each in CHECKS:
        method = _Method(each, name, provider, getattr(cls, each))
        type.__setattr__(keeping, each, _guarded(keeping, method))


def expect_plain(value: Any) -> Any:
    """Return the result of code that is not to be async.

    Raises:
        TypeError: the result is a coroutine, which nobody awaits.
    """
    if inspect.iscoroutine(value):
        value.close()
        raise TypeError(f"{value.__qualname__} is an async function, expected a plain one")
    return value


@dataclass(frozen=True)
class _Method:
    """A method of a platform, for errors."""

    name: str
    platform: str
    provider: Provider
    defined: Any

    @property
    def whose(self) -> str:
        return printable(f"platform {self.platform!r} of {self.provider}")

    def failed(self, problem: str, place: str | None = None) -> PluginError:
        """Return the error about the method, by default with the place of its definition."""
        place = place or location_of(self.defined)
        without = f"{PLUGINS_DISABLE}={self.provider.name}"
        message = (
            f"{self.whose}: its method {self.name}() {problem}, at {place}. Choose another "
            f"platform by {PLATFORM}, or go without its plugin by {without}."
        )
        return PluginError(printable(message), place)

    def raised(self, error: BaseException, package: str) -> PluginError:
        """Return the error about an exception that left the method of a class of ``package``."""
        if not isinstance(error, PluginError):
            place = raised_in(package, error)
            return self.failed(f"raised {described(error)}", place)
        if str(error).startswith(self.whose):  # of another method, which this one has called
            return error
        return self.failed(f"raised {described(error)}", error.location)


def _guarded(keeping: Any, method: _Method) -> Callable[..., Any]:
    name = method.name
    package = keeping.__module__.partition(".")[0]
    what = f"{method.whose} in its method {name}"

    @functools.wraps(method.defined)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with watching_code(what, method.provider):
                run = getattr(super(keeping, self), name)
                result = run(*args, **kwargs)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a plugin's code
            told = method.raised(error, package)
            if told is error:
                raise
            raise told from error
        try:
            expect_plain(result)
            CHECKS[name](result)
        except (TypeError, ValueError) as error:
            raise method.failed(f"is wrong: {error}") from None
        return result

    return call


def _count(value: Any) -> None:
    if not _is_whole(value) or value < 0:
        raise _unexpected(value, "a number of devices")
    # The doctor asks each device.
    if value > MOST_DEVICES:
        raise _unexpected(value, f"at most {MOST_DEVICES:,} devices")


def _capability(value: Any) -> None:
    if not isinstance(value, DeviceCapability):
        raise _unexpected(value, "an opgraft.DeviceCapability")
    if not isinstance(value.name, str):
        raise _unexpected(value.name, "a string as name")
    dtypes = value.dtypes
    if not _is_collection_of(dtypes, _is_dtype) or not dtypes:
        raise _unexpected(dtypes, "a tuple of floating-point dtypes as dtypes")
    if value.fp8_dtype is not None and not _is_dtype(value.fp8_dtype):
        raise _unexpected(value.fp8_dtype, "a dtype or None as fp8_dtype")
    if not _is_collection_of(value.features, _is_text):
        raise _unexpected(value.features, "a tuple of strings as features")


def _memory(value: Any) -> None:
    if not isinstance(value, DeviceMemory):
        raise _unexpected(value, "an opgraft.DeviceMemory")
    for each in (value.free, value.total):
        if not _is_whole(each):
            raise _unexpected(each, "a whole number of bytes")
    if not 0 <= value.free <= value.total:
        raise ValueError(f"it tells {value.free:,} bytes free of {value.total:,}")
    if not value.total:
        raise ValueError("it tells 0 bytes in all, which leaves no room for a cache")


def _anything(value: Any) -> None:
    """Accept whatever a method returns that is called for its effect."""


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_collection_of(value: Any, fits: Callable[[Any], bool]) -> bool:
    if not isinstance(value, Collection) or isinstance(value, str | bytes | Mapping):
        return False
    return all(map(fits, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_dtype(value: Any) -> bool:
    torch: Any = sys.modules.get("torch")  # whoever makes a dtype has imported it
    if torch is None or not isinstance(value, torch.dtype):
        return False
    return bool(value.is_floating_point)


def _unexpected(value: Any, expected: str) -> TypeError:
    return TypeError(f"it returned {_shown(value)}, expected {expected}")


def _shown(value: Any) -> str:
    if value is None or isinstance(value, int | str):
        return f"{value!r:.80}"
    return f"a {type(value).__name__}"


CHECKS: Mapping[str, Callable[[Any], None]] = MappingProxyType(
    {
        "device_count": _count,
        "capability": _capability,
        "memory": _memory,
        "synchronize": _anything,
        "manual_seed": _anything,
    }
)
"""The methods that opgraft calls while a model runs, with functions that refuse wrong results.

``default_config`` and ``prepare`` are called once, while a platform is loaded, and are checked
there.
"""
