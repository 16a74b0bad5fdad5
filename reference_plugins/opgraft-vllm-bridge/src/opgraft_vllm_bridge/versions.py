"""The version of vLLM that a plugin reads in ``vllm.__version__``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import importlib_metadata
from opgraft import __version__ as _opgraft
from opgraft.errors import ConfigError
from opgraft.plugins.bridges import current_config, specs_of
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from opgraft_vllm_bridge.missing import PLUGINS

NEWEST = "0.33.0"
"""The version of vLLM with the names that the bridge answers."""

OLDEST = "0.9.0"
"""The oldest version of vLLM with former places of names that the bridge answers."""

SETTING = "vllm_bridge.vllm_version"
_VLLM = "vllm"
_RANGE = re.compile(r"\s*(~=|==|!=|<=?|>=?)\s*\d")


def announced_to(plugin: str) -> str:
    """Return the version for a plugin, such as ``0.33.0+opgraft0.1.0``.

    The version is the first of these:

    1. the version of the setting,
    2. the newest version that the bridge covers and the plugin requires,
    3. the newest version that the bridge covers.

    Raises:
        ConfigError: the setting is no version.
    """
    setting = current_config().of_plugins.get(SETTING)
    version = _public(setting) if setting else _fitting(plugin)
    return f"{version}+opgraft{_opgraft}"


def numbers_of(version: str) -> tuple[int, ...]:
    """Return the numbers of a version. Example: ``(0, 33, 0)`` for ``0.33.0+opgraft0.1.0``."""
    return Version(version).release


def _public(setting: Any) -> str:
    """Return the version of the setting, without a local part such as ``+cpu``."""
    try:
        return Version(str(setting)).public
    except InvalidVersion as error:
        raise ConfigError(
            f"{SETTING} is {setting!r:.80}, expected a version of vLLM such as '{NEWEST}'"
        ) from error


def _fitting(plugin: str) -> str:
    """Return the newest covered version that a plugin requires, or the newest one if none fits."""
    required = SpecifierSet(",".join(map(str, _requirements(plugin))))
    oldest = Version(OLDEST)
    newest = Version(NEWEST)
    # A requirement may name a version that is no first release, such as 0.11.2.
    candidates = {Version(each.version.removesuffix(".*")) for each in required}
    for minor in range(oldest.minor, newest.minor + 1):
        candidates.add(Version(f"0.{minor}.0"))
    fitting = [each for each in candidates if oldest <= each <= newest and each in required]
    return max(fitting, default=newest).public


def _requirements(plugin: str) -> Iterator[SpecifierSet]:
    """Yield the versions of vLLM that a plugin requires.

    A plugin names them in its metadata, or in a constant such as ``VLLM_RANGE``.
    """
    try:
        distribution = importlib_metadata.distribution(plugin)
    except (importlib_metadata.PackageNotFoundError, ValueError):
        return
    for text in distribution.requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        marker = requirement.marker
        applies = marker is None or marker.evaluate({"extra": ""})
        if requirement.name == _VLLM and applies:
            yield requirement.specifier
    for package, name in PLUGINS.items():
        if name == plugin:
            yield from _ranges_in(package)


def _ranges_in(package: str) -> Iterator[SpecifierSet]:
    """Yield the ranges of versions in a package's constants with ``VLLM`` in their names."""
    *_, spec = specs_of(package)
    file = Path(spec.origin or "")
    if file.suffix != ".py":
        return
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for statement in tree.body:
        if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Constant):
            continue
        names = [target.id for target in statement.targets if isinstance(target, ast.Name)]
        text = statement.value.value
        if not isinstance(text, str) or not _RANGE.match(text):
            continue
        if any("VLLM" in name.upper() for name in names):
            try:
                yield SpecifierSet(text)
            except InvalidSpecifier:
                continue
