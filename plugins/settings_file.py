"""The file of settings that a distribution declares. Nothing is imported to read the file."""

from __future__ import annotations

import os
from collections.abc import Mapping

from opgraft.base.files import read_regular
from opgraft.config import Field
from opgraft.config.environment import VARIABLES
from opgraft.config.files import parse_toml
from opgraft.config.plugin_settings import SETTINGS_FILE, declared_fields
from opgraft.errors import ConfigError
from opgraft.plugins.metadata import specs_of

_LARGEST = 1 << 18
"""The largest number of bytes of such a file."""


def fields_of_package(
    package: str, section: str, provider: str, taken: Mapping[str, Field]
) -> dict[str, Field]:
    """Return the settings that the file in a package declares, by dotted name.

    Args:
        package: the value of the entry point, such as ``opgraft_acme``.
        section: the name of the entry point, and of the section.
        provider: the distribution.
        taken: the settings of opgraft and of other distributions.

    Raises:
        ConfigError: there is no such file, or a declaration is wrong.
        PluginError: a finder of modules raised.
    """
    path = _path_in(package)
    try:
        tables = parse_toml(read_regular(path, _LARGEST).decode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    # The file is no regular file, too large, no UTF-8, or no TOML.
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return declared_fields(section, tables, provider, taken, VARIABLES)


def _path_in(package: str) -> str:
    """Return the path of the file in a package.

    Raises:
        ConfigError: there is no such package, or the package has no such file.
    """
    specs = list(specs_of(package))
    if len(specs) <= package.count("."):
        raise ConfigError(f"there is no package {package}: name the one with {SETTINGS_FILE}")
    folders = specs[-1].submodule_search_locations
    if folders is None:
        raise ConfigError(
            f"{package} is a module: name the package whose folder has {SETTINGS_FILE}"
        )
    for folder in folders:
        path = os.path.join(folder, SETTINGS_FILE)
        if os.path.exists(path):
            return path
    raise ConfigError(
        f"the package {package} has no {SETTINGS_FILE}: list the file among the package data of "
        "the distribution"
    )
