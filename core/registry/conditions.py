"""Conditions of replacements on the platform, decided once the platform is known."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from opgraft.base.installed import version_of
from opgraft.base.text import described
from opgraft.config.environment import PLATFORM
from opgraft.errors import PluginError, RegistrationError, close_matches
from opgraft.platform import DeviceCapability, Platform
from opgraft.registry.decision import Provider
from opgraft.registry.watching import kept, watching_code

_LEVEL = re.compile(r"sm_(\d+)(\d)")
"""A feature with a compute level, such as ``sm_90``."""


@dataclass(frozen=True)
class When:
    """A condition of a replacement in fields. A decision names the field that does not hold.

    Each field is a text with terms, joined by commas. All given fields must hold.

    Attributes:
        platform: names of platforms. The current platform must be one of these.
        capability: features of the device, such as ``avx512f``, and bounds of the compute level,
            such as ``>=8.0,<10``. Bounds hold only on devices with a compute level.
        dtype: floating-point dtypes that the device must support, such as ``bfloat16``.
        package: required distributions, such as ``flash-attn>=2.5``.
    """

    platform: str = ""
    capability: str = ""
    dtype: str = ""
    package: str = ""

    def __post_init__(self) -> None:
        for name, value in self._fields().items():
            if not isinstance(value, str):
                raise RegistrationError(
                    f"When({name}={value!r:.80}): use text, several joined by commas"
                )
        given = self._given()
        if not given:
            raise RegistrationError(
                "When() states no condition: give platform, capability, dtype or package"
            )
        for name, value in given.items():
            # Without this error, a field such as "," would hold everywhere.
            if not _terms(value):
                raise RegistrationError(
                    f"{self} has no term in {name}: give one, or leave the field out"
                )
        _check_dtypes(_terms(self.dtype))
        try:
            # Any version serves: the parser alone finds malformed bounds.
            _within("1.0", ",".join(_bounds(self.capability)))
            for line in _requirements(self.package):
                _name_and_bounds(line)
        except ValueError as error:
            raise RegistrationError(
                f"{self} is malformed: {error}. A capability is like 'avx512f' or '>=8.0,<10', a "
                "package like 'x>=2'"
            ) from error

    def against(self, platform: Platform) -> str | None:
        """Return the term that does not hold on a platform, in words; ``None`` if all hold."""
        if self.platform and platform.name not in _terms(self.platform):
            return f"platform is {platform.name}, wanted {self.platform}"
        for line in _requirements(self.package):
            name, wanted = _name_and_bounds(line)
            version = version_of(name)
            if version is None or not _within(version, wanted):
                return f"{name} is {version or 'not installed'}, wanted {line}"
        if self.capability or self.dtype:
            return self._against_device(platform.capability())
        return None

    def _against_device(self, device: DeviceCapability) -> str | None:
        dtypes = [str(dtype).removeprefix("torch.") for dtype in device.dtypes]
        lacking = [dtype for dtype in _terms(self.dtype) if dtype not in dtypes]
        if lacking:
            return f"dtype {lacking[0]} is none of {device.name}: {', '.join(dtypes)}"
        bounds = _bounds(self.capability)
        for term in _terms(self.capability):
            if term not in bounds and term not in device.features:
                return f"capability {term} is none of {device.name}"
        if not bounds:
            return None
        level = _level_of(device)
        wanted = ",".join(bounds)
        if level is None or not _within(level, wanted):
            return f"compute level of {device.name} is {level or 'not known'}, wanted {wanted}"
        return None

    def _fields(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def _given(self) -> dict[str, str]:
        return {name: value for name, value in self._fields().items() if value}

    def __str__(self) -> str:
        given = [f"{name}={value!r}" for name, value in self._given().items()]
        return f"When({', '.join(given)})"


def _level_of(device: DeviceCapability) -> str | None:
    """Return the compute level of a device, such as ``9.0``; ``None`` if there is none."""
    for feature in device.features:
        match = _LEVEL.fullmatch(feature)
        if match:
            return f"{match[1]}.{match[2]}"
    return None


Condition: TypeAlias = Callable[[Platform], Any] | When


def objection_of(
    condition: Condition, platform: Platform, what: str, provider: Provider
) -> str | None:
    """Return the reason why a condition does not hold on a platform, ``None`` if it does.

    Args:
        condition: the condition of the replacement.
        platform: the current platform.
        what: the condition in words, for messages about a slow or faulty one.
        provider: the provider of the replacement.

    Raises:
        PluginError: a ``When`` asks for the capability of the device, and the platform fails.
    """
    if isinstance(condition, When):
        against = _against(condition, platform)
        return against and f"its when= condition is false here: {against}"
    try:
        with watching_code(what, provider), kept(what, provider, condition):
            holds = condition(platform)
        return None if holds else "its when= condition is false here"
    except KeyboardInterrupt:
        raise
    # A plugin's code may raise anything. The decision keeps the reason.
    except BaseException as error:
        return f"its when= condition raised {described(error)}"


def _against(condition: When, platform: Platform) -> str | None:
    try:
        return condition.against(platform)
    # This error names the platform at fault.
    except PluginError:
        raise
    except Exception as error:
        raise PluginError(
            f"platform {platform.name!r} cannot tell its capability, for which a when= condition "
            f"asks: {described(error)}. Choose another platform by {PLATFORM}."
        ) from error


def _check_dtypes(names: list[str]) -> None:
    """Check the names of dtypes in a condition.

    Raises:
        RegistrationError: torch has no floating-point dtype of the name.
    """
    # Not imported here: to register a replacement needs torch, and a condition alone does not.
    torch = sys.modules.get("torch")
    if not names or not torch:
        return
    # A copy of the values, as another thread may import a part of torch meanwhile.
    dtypes = [each for each in list(vars(torch).values()) if isinstance(each, torch.dtype)]
    known = [str(dtype).removeprefix("torch.") for dtype in dtypes if dtype.is_floating_point]
    for name in names:
        if name not in known:
            raise RegistrationError(
                f"When(dtype={name!r:.80}) is no floating-point dtype: {close_matches(name, known)}"
            )


def _terms(text: str) -> list[str]:
    return [term.strip() for term in text.split(",") if term.strip()]


def _bounds(text: str) -> list[str]:
    """Return the terms with bounds of a compute level."""
    return [term for term in _terms(text) if term[0] in "<>=!~"]


def _requirements(text: str) -> Iterable[str]:
    """Yield requirements, each with all bounds: ``x>=2,<3,y`` gives ``x>=2,<3`` and ``y``."""
    line = ""
    for term in _terms(text):
        if line and term[0] not in "<>=!~":
            yield line
            line = ""
        line += f",{term}" if line else term
    if line:
        yield line


def _within(version: str, bounds: str) -> bool:
    # Few plugins need this import of 20 ms.
    from packaging.specifiers import SpecifierSet

    # Nightly builds count, too.
    return SpecifierSet(bounds).contains(version, prereleases=True)


def _name_and_bounds(line: str) -> tuple[str, str]:
    from packaging.requirements import Requirement

    requirement = Requirement(line)
    return requirement.name, str(requirement.specifier)
