"""The names of ops and classes in settings, such as ``custom_ops`` and ``providers``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opgraft.config import Settings
from opgraft.errors import ConfigError, close_matches
from opgraft.registry.declarations import Registry, Replacement
from opgraft.registry.state import HostState, host_state


def op_name_of(cls: type, state: HostState) -> str | None:
    """Return the registered name for ``cls`` in settings.

    A class without a name of its own has the name of the nearest base with one.
    """
    return _nearest(cls, _names_of_classes(state))


def other_replacements_of_op(cls: type, replacements: Sequence[Replacement]) -> list[Replacement]:
    """Return the replacements of other classes with the same name in settings as ``cls``."""
    names = _names_of_classes(host_state())
    name = _nearest(cls, names)
    others = []
    for replacement in replacements:
        target = replacement.target
        if target and target is not cls and _nearest(target, names) == name:
            others.append(replacement)
    return others


def _names_of_classes(state: HostState) -> dict[type, str]:
    return {record.cls: name for name, record in state.registry.records().items()}


def _nearest(cls: type, names: Mapping[type, str]) -> str | None:
    for base in cls.__mro__:
        if base in names:
            return names[base]
    return None


def check_names(settings: Settings, registry: Registry) -> None:
    """Check the names of ops and classes in settings.

    Raises:
        ConfigError: the settings name an op or class without a registration.
    """
    for field, names in settings.config.op_names().items():
        known = registry.named_by(field)
        for name in names:
            if name in known:
                continue
            named = f"{field} names the op {name!r} ({settings.origins[field]})"
            several = registry.ops_of_class(name)
            if len(several) > 1:
                raise ConfigError(
                    f"{named}, but several ops have a class of that name: name one of "
                    f"{', '.join(map(repr, several))}"
                )
            raise ConfigError(
                f"{named}, but no op has that name: {close_matches(name, known)} 'opgraft ops "
                "list' shows all; import the package that registers an op before it is named."
            )
