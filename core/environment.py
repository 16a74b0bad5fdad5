"""The environment variables of opgraft, read and validated here and nowhere else."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

from opgraft.errors import ConfigError, close_matches

PLATFORM = "OPGRAFT_PLATFORM"
PLUGINS = "OPGRAFT_PLUGINS"
PLUGINS_DISABLE = "OPGRAFT_PLUGINS_DISABLE"
CUSTOM_OPS = "OPGRAFT_CUSTOM_OPS"
STRICT = "OPGRAFT_STRICT"
CHECK_VALUES = "OPGRAFT_CHECK_VALUES"
CPU_KEEP_MEMORY = "OPGRAFT_CPU_KEEP_MEMORY"
PROVIDERS = "OPGRAFT_PROVIDERS"
LOG = "OPGRAFT_LOG"

VARIABLES: Mapping[str, str] = {
    PLATFORM: "name of the platform to use; an error if it is absent or unavailable",
    PLUGINS: "comma-separated allow list of plugins, by entry-point or distribution name; empty means none",
    PLUGINS_DISABLE: "comma-separated deny list of plugins, by entry-point or distribution name",
    CUSTOM_OPS: "which custom ops are enabled, as in compilation_config.custom_ops: all, none, +op, -op",
    STRICT: "1: a failing plugin or probe raises; 0 (default): it is recorded and reported",
    CHECK_VALUES: "1: ops check positions and the like on accelerators too, which then wait; 0 (default): on CPUs only",
    CPU_KEEP_MEMORY: "1: on the CPU platform freed memory stays with the process; 0 (default): it goes to the system",
    PROVIDERS: "whose replacement serves an op: op=plugin pairs separated by commas, or a JSON object",
    LOG: "what is logged on stderr: debug, info, warning (default) or error",
}

FLAG_WORDS = {**dict.fromkeys(("1", "true", "yes", "on"), True), **dict.fromkeys(("0", "false", "no", "off"), False)}
"""The spellings of a flag."""

LOG_LEVELS = ("debug", "info", "warning", "error")
"""The values that ``OPGRAFT_LOG`` may have."""
"""The spellings of a flag."""


@dataclass(frozen=True)
class Environment:
    """The settings that the environment asks for; ``None`` where a variable is not set."""

    platform: str | None = None
    plugins: tuple[str, ...] | None = None
    plugins_disable: tuple[str, ...] | None = None
    custom_ops: tuple[str, ...] | None = None
    strict: bool | None = None
    check_values: bool | None = None
    cpu_keep_memory: bool | None = None
    providers: dict[str, str] | None = None
    log: str | None = None


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Read the variables of ``VARIABLES`` from a mapping, by default from ``os.environ``.

    Raises:
        ConfigError: a value is not one of those listed, or a variable beginning with ``OPGRAFT_`` is not known.
    """
    values = os.environ if variables is None else variables
    for name in values:
        if name.startswith("OPGRAFT_") and name not in VARIABLES:
            raise ConfigError(
                f"unknown environment variable {name}: {close_matches(name, VARIABLES)} Unset or rename it."
            )
    return Environment(
        platform=values.get(PLATFORM) or None,
        plugins=_names(values.get(PLUGINS)),
        plugins_disable=_names(values.get(PLUGINS_DISABLE)),
        custom_ops=_names(values.get(CUSTOM_OPS)),
        strict=_flag(STRICT, values.get(STRICT)),
        check_values=_flag(CHECK_VALUES, values.get(CHECK_VALUES)),
        cpu_keep_memory=_flag(CPU_KEEP_MEMORY, values.get(CPU_KEEP_MEMORY)),
        providers=_providers(values.get(PROVIDERS)),
        log=_log_level(values.get(LOG)),
    )


def _names(value: str | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    return tuple(part.strip() for part in value.split(",") if part.strip())


def _flag(name: str, value: str | None) -> bool | None:
    return parse_flag(name, value) if value else None


def _providers(value: str | None) -> dict[str, str] | None:
    return parse_providers(PROVIDERS, value) if value else None


def parse_providers(name: str, value: str) -> dict[str, str]:
    """Parse the mapping of op name to provider in the setting ``name``: ``op=plugin,…`` or a JSON object.

    Raises:
        ConfigError: another spelling.
    """
    if value.lstrip().startswith("{"):
        try:
            found = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{name} {value!r} is not valid JSON: {error}") from error
    else:
        pairs = [part.partition("=") for part in value.split(",") if part.strip()]
        found = {op.strip(): provider.strip() for op, _, provider in pairs}
    if not all(isinstance(provider, str) and op and provider for op, provider in found.items()):
        raise ConfigError(f"{name} is {value!r}: use op=plugin pairs separated by commas, or a JSON object of them")
    return found  # type: ignore[no-any-return]  # what a JSON object holds was checked


def _log_level(value: str | None) -> str | None:
    if value and value.lower() not in LOG_LEVELS:
        raise ConfigError(f"{LOG}={value!r} is no level: use one of {', '.join(LOG_LEVELS)}")
    return value.lower() if value else None


def parse_flag(name: str, value: str) -> bool:
    """Parse the truth value of the setting ``name``, spelled as one of 1, true, yes, on, 0, false, no, off.

    Raises:
        ConfigError: another spelling.
    """
    try:
        return FLAG_WORDS[value.strip().lower()]
    except KeyError:
        raise ConfigError(f"{name}={value!r} is not a flag: use one of {', '.join(FLAG_WORDS)}") from None
