"""The names by which settings switch and choose ops and classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opgraft.config import Settings
from opgraft.errors import ConfigError, close_matches
from opgraft.registry.declarations import Registry, Replacement
from opgraft.registry.state import HostState, host_state


def op_name_of(cls: type, state: HostState) -> str | None:
    """Return the registered name that switches ``cls``: its own, or that of the nearest registered base."""
    return _nearest(cls, _names_of_classes(state))


def kin_of(cls: type, replacements: Sequence[Replacement]) -> list[Replacement]:
    """Return the replacements of other classes that the op name of ``cls`` switches too."""
    names = _names_of_classes(host_state())
    name = _nearest(cls, names)
    return [
        r
        for r in replacements
        if r.target and r.target is not cls and _nearest(r.target, names) == name
    ]


def _names_of_classes(state: HostState) -> dict[type, str]:
    return {record.cls: name for name, record in state.registry.records().items()}


def _nearest(cls: type, names: Mapping[type, str]) -> str | None:
    for base in cls.__mro__:
        if base in names:
            return names[base]
    return None


def check_names(settings: Settings, registry: Registry) -> None:
    """Raise ``ConfigError`` where the settings name an op or class that is not registered."""
    for field, names in settings.config.op_names().items():
        known = registry.named_by(field)
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"{field} names the op {name!r} ({settings.origins[field]}), but no op has that name: "
                    f"{close_matches(name, known)} 'opgraft ops list' shows all; import the package that registers "
                    "an op before it is named."
                )
