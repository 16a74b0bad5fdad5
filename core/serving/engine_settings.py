"""Settings of an engine, from the keyword arguments of ``LLM``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from opgraft.config import OpgraftConfig, known_fields, set_config
from opgraft.config.engine_arguments import (
    COMPILATION,
    ENFORCE_EAGER,
    SHORT_NAMES,
    advice_about,
    compilation_settings,
    level_of_eager,
)
from opgraft.config.whole import check_known, config_from_fields, resolve
from opgraft.errors import ConfigError, close_matches
from opgraft.plugins.host import load_plugins
from opgraft.plugins.selection import current_platform
from opgraft.registry.state import host_state

_ARGUMENTS = "the arguments of LLM"


def engine_config(
    model: str | None, opgraft_config: OpgraftConfig | None, settings: Mapping[str, Any]
) -> OpgraftConfig:
    """Return the settings of an engine as ``LLM`` takes them.

    Raises:
        ConfigError: a setting is unknown, or has a wrong value.
        PlatformError: the platform is not available, or the process already uses another one.
    """
    named = {"model.name": model} if model is not None else {}
    arguments = config_from_fields({**_by_dotted_names(settings), **named})
    if opgraft_config is None:
        _load_plugins_for([(_ARGUMENTS, arguments)])
        with set_config(arguments, origin=_ARGUMENTS):
            return host_state().settings().handed_down()
    # A given config replaces the process's settings, so the environment does not count.
    whole = "the opgraft_config of LLM"
    layers = [(whole, opgraft_config), (_ARGUMENTS, arguments)]
    _load_plugins_for(layers)
    names = host_state().registry.names_by_class()
    return resolve((), layers, names).handed_down(whole)


def _load_plugins_for(layers: Sequence[tuple[str, OpgraftConfig]]) -> None:
    """Load the plugins for the platform and the model of some layers.

    Defaults of a platform may depend on the model. Other settings of one engine must not decide
    about plugins, which are the whole process's.
    """
    with ExitStack() as scopes:
        for origin, layer in layers:
            deciding = OpgraftConfig(platform=layer.platform, model=layer.model)
            scopes.enter_context(set_config(deciding, origin=origin))
        load_plugins()
        # An earlier engine may have loaded them, for another platform.
        current_platform()


def _by_dotted_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, tuple[str, Any]] = {}
    for name, given in settings.items():
        for dotted, value in _settings_of(name, given).items():
            if dotted in found:
                first, _ = found[dotted]
                raise ConfigError(
                    f"{first} is {settings[first]!r:.80} and {name} {given!r:.80}, and both stand "
                    f"for {dotted}: leave one out"
                )
            found[dotted] = name, value
    return {dotted: value for dotted, (_, value) in found.items()}


def _settings_of(name: str, value: Any) -> dict[str, Any]:
    """Return the settings, by dotted name, that a keyword argument stands for.

    Raises:
        ConfigError: there is no such argument.
    """
    if name == ENFORCE_EAGER:
        return level_of_eager(value)
    if name == COMPILATION:
        return compilation_settings(value)
    if name in known_fields():
        return {name: value}
    if name in SHORT_NAMES:
        return {SHORT_NAMES[name]: value}
    # A dotted name is meant as a setting, and this error has close matches among settings.
    if "." in name:
        check_known(name)
    advice = advice_about(name)
    advice = f"{advice}." if advice else close_matches(name, SHORT_NAMES)
    raise ConfigError(
        f"LLM has no argument {name!r}: {advice} Every setting is taken by its dotted "
        "name, as in **{'cache.memory_bytes': 1 << 30}"
    )
