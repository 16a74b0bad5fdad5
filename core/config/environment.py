"""The environment variables of opgraft, read and validated here and nowhere else."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from opgraft.config import FIELDS, ConfigFile, Layers, config_from_fields, parse_text, read_file
from opgraft.errors import ConfigError, close_matches

PLATFORM = "OPGRAFT_PLATFORM"
PLUGINS = "OPGRAFT_PLUGINS"
PLUGINS_DISABLE = "OPGRAFT_PLUGINS_DISABLE"
LOCKFILE = "OPGRAFT_LOCKFILE"
PROVIDERS = "OPGRAFT_PROVIDERS"
CONFIG = "OPGRAFT_CONFIG"
LOG = "OPGRAFT_LOG"
DECISION = "OPGRAFT_DECISION"
SIMULATED_DEVICE = "OPGRAFT_SIMULATED_DEVICE"

VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        **{field.variable: field.help for field in FIELDS.values()},
        CONFIG: "a JSON or TOML file of settings, which stand below the environment's own",
        DECISION: "what the process that started this one has decided, to be decided alike; see "
        "opgraft.share_decisions",
        LOG: "what is logged on stderr: debug, info, warning (default) or error",
        SIMULATED_DEVICE: "an accelerator to simulate: name=Acme X1,memory=64MiB, or default",
    }
)
"""Every variable with its meaning: one for each setting, and those of the process as a whole."""

LOG_LEVELS = ("debug", "info", "warning", "error")
"""The values that ``OPGRAFT_LOG`` may have."""


@dataclass(frozen=True)
class SharedDecision:
    """The decisions of the process of that identity, each with what it is about."""

    process: str
    rows: Mapping[str, str]

    @property
    def digest(self) -> str:
        """Tell these decisions from others, and from what is left of them where a variable was cut."""
        return hashlib.sha256(json.dumps(dict(self.rows), sort_keys=True).encode()).hexdigest()[:16]

    def to_text(self) -> str:
        """Return what the variable holds."""
        return json.dumps({"digest": self.digest, "process": self.process, "rows": dict(self.rows)})

    def rows_for(self, process: str) -> Mapping[str, str] | None:
        """Return them for another process than the one that has made them."""
        return None if process == self.process else self.rows


@dataclass(frozen=True)
class Environment:
    """The environment's say: a layer per variable that is set, the path of a file of settings, the level of logs.

    ``decision`` is what another process has shared.
    """

    layers: Layers = ()
    path: str | None = None
    log: str | None = None
    decision: SharedDecision | None = None

    @functools.cached_property
    def file(self) -> ConfigFile | None:
        """Return the file of settings, read on first use: where another one stands in its place it is never opened.

        Raises:
            ConfigError: it cannot be used.
        """
        try:
            return read_file(self.path) if self.path else None
        except ConfigError as error:
            raise ConfigError(f"{CONFIG}: {error}") from error


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
        _layers(values),
        values.get(CONFIG),
        _log_level(values.get(LOG)),
        _shared(values.get(DECISION)),
    )


def _shared(text: str | None) -> SharedDecision | None:
    if not text:
        return None
    try:
        data = json.loads(text)
        rows = {str(name): str(value) for name, value in data["rows"].items()}
        shared = SharedDecision(str(data["process"]), rows)
        if data["digest"] != shared.digest:
            raise ValueError("its digest is that of other decisions")
        return shared
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{DECISION}={text!r:.80} is nothing that opgraft.share_decisions wrote: unset it"
        ) from error


def _layers(values: Mapping[str, str]) -> Layers:
    """Make a layer of each variable, so that a setting's origin names its variable. An empty list is a value."""
    layers = []
    for field in FIELDS.values():
        text = values.get(field.variable)
        if text == "" and field.variable == LOCKFILE:
            raise ConfigError(
                f"{LOCKFILE} is empty, which pins nothing: name one, or unset it to go without"
            )
        if text is None or not (text or field.kind.metavar == "LIST"):
            continue
        value = parse_text(field.name, text, field.variable)
        layers.append((field.variable, config_from_fields({field.name: value})))
    return tuple(layers)


def _log_level(value: str | None) -> str | None:
    if value and value.lower() not in LOG_LEVELS:
        raise ConfigError(f"{LOG}={value!r} is no level: use one of {', '.join(LOG_LEVELS)}")
    return value.lower() if value else None


_DECIDING = (PLATFORM, PLUGINS, PLUGINS_DISABLE, LOCKFILE, PROVIDERS)
_OF_TORCH = ("ATEN_", "DNNL_", "ONEDNN_", "TORCH_ALLOW_")
"""Beginnings of the names of variables by which torch and its libraries choose how they compute."""


def deciding_variables(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that are set and may change what a process computes, by default of ``os.environ``."""
    values = os.environ if variables is None else variables
    return {
        name: value
        for name, value in values.items()
        if name in _DECIDING or name.startswith(_OF_TORCH)
    }


_OF_SESSIONS = re.compile(
    "_|PWD|OLDPWD|SHLVL|TERM|TERM_.*|COLORTERM|COLUMNS|LINES|WINDOWID|TMUX.*|STY|SSH_.*|XDG_SESSION_ID|PYTEST_.*"
)


def lasting_variables(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables, by default of ``os.environ``, less those that differ from one terminal to the next."""
    values = os.environ if variables is None else variables
    return {name: values[name] for name in sorted(values) if not _OF_SESSIONS.fullmatch(name)}


@dataclass(frozen=True)
class Launch:
    """The place of a process among those that a launcher such as ``torchrun`` has started.

    Attributes:
        size: the number of processes, on all hosts.
        local_rank: its number on this host.
        local_size: the number of processes on this host.
    """

    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def read_launch(variables: Mapping[str, str] | None = None) -> Launch:
    """Read the variables that launchers set, by default from ``os.environ``; without them this process is alone.

    Raises:
        ConfigError: one of them is no number.
    """
    values = os.environ if variables is None else variables
    size = _number(values, "WORLD_SIZE", 1)
    return Launch(size, _number(values, "LOCAL_RANK", 0), _number(values, "LOCAL_WORLD_SIZE", size))


def _number(values: Mapping[str, str], name: str, otherwise: int) -> int:
    text = values.get(name) or str(otherwise)
    if not text.isdecimal():
        raise ConfigError(
            f"{name}={text!r:.80} is no number: unset it, or start with a launcher, such as torchrun"
        )
    return int(text)


def read_simulated(variables: Mapping[str, str] | None = None) -> str:
    """Return the description of the simulated device; empty if there is none."""
    return (os.environ if variables is None else variables).get(SIMULATED_DEVICE, "")


_OF_COMPILERS = re.compile(
    "(TORCHINDUCTOR|TORCHDYNAMO|TORCH_COMPILE|ATEN|OMP|GOMP|KMP|MKL|ONEDNN|DNNL|TRITON)_.*|CC|CXX|C(XX|PP)?FLAGS|LDFLAGS|CPATH"
)
_FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def read_compilers(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that change what compilers make, by default of ``os.environ``; not where they keep it."""
    values = os.environ if variables is None else variables
    return {
        name: values[name]
        for name in sorted(values)
        if _OF_COMPILERS.fullmatch(name) and name not in _FOLDERS
    }


def cache_home(variables: Mapping[str, str] | None = None) -> Path:
    """Return the folder in which programs of this user keep caches, by default as ``os.environ`` says."""
    values = os.environ if variables is None else variables
    return Path(values.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def hub_cache(variables: Mapping[str, str] | None = None) -> Path:
    """Return the folder of models from the Hugging Face Hub, by default as ``os.environ`` says.

    The variables are those that the Hub's own library reads, and so are no settings of opgraft.
    """
    values = os.environ if variables is None else variables
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if values.get(name):
            return Path(values[name]).expanduser()
    if values.get("HF_HOME"):
        return Path(values["HF_HOME"]).expanduser() / "hub"
    return cache_home(values).expanduser() / "huggingface" / "hub"


def state_home(variables: Mapping[str, str] | None = None) -> Path:
    """Return the folder in which programs of this user keep what outlives a run, by default as ``os.environ`` says.

    Raises:
        RuntimeError: the user has no home folder.
    """
    values = os.environ if variables is None else variables
    return Path(values.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
