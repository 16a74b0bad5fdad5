"""Read and validate the environment variables of opgraft. No other module reads them."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from urllib.parse import unquote

from opgraft.config import (
    FIELDS,
    ConfigFile,
    Field,
    Layers,
    config_from_fields,
    parse_text,
    plugin_fields,
    read_file,
)
from opgraft.errors import ConfigError, close_matches

PLATFORM = "OPGRAFT_PLATFORM"
PLUGINS = "OPGRAFT_PLUGINS"
PLUGINS_DISABLE = "OPGRAFT_PLUGINS_DISABLE"
LOCKFILE = "OPGRAFT_LOCKFILE"
PROVIDERS = "OPGRAFT_PROVIDERS"
CONFIG = "OPGRAFT_CONFIG"
LOG = "OPGRAFT_LOG"
DECISION = "OPGRAFT_DECISION"
REPORT = "OPGRAFT_REPORT"
SIMULATED_DEVICE = "OPGRAFT_SIMULATED_DEVICE"

VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        **{field.variable: field.help for field in FIELDS.values()},
        CONFIG: "a JSON or TOML file of settings, which stand below the environment's own",
        DECISION: "what the process that started this one has decided, to be decided alike; see "
        "opgraft.share_decisions",
        LOG: "what is logged on stderr: debug, info, warning (default) or error",
        REPORT: "a JSON file for the kernels that run in the process of another program",
        SIMULATED_DEVICE: "an accelerator to simulate: name=Acme X1,memory=64MiB, or default",
    }
)
"""Each variable of opgraft with the meaning: one for each setting, some for the whole process."""

_COMPRESSIONS = ("none", "gzip", "deflate")
_TOKEN = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)
"""The name of a header, by RFC 9110."""
_HEADER = re.compile(r"[\t -~\xa0-\xff]*")
"""The value of a header, by RFC 9110."""

LOG_LEVELS = ("debug", "info", "warning", "error")
"""The values of ``OPGRAFT_LOG``."""


@dataclass(frozen=True)
class SharedDecision:
    """The decisions of a process.

    Attributes:
        process: the identity of the process.
        rows: the choice by subject, such as ``kernel of rms_norm``.
    """

    process: str
    rows: Mapping[str, str]

    @property
    def digest(self) -> str:
        """A digest of the decisions. A variable that was cut does not match it."""
        # Sorted, as JSON promises no order.
        text = json.dumps(dict(self.rows), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_text(self) -> str:
        """Return the text for the variable."""
        return json.dumps({"digest": self.digest, "process": self.process, "rows": dict(self.rows)})

    def rows_for(self, process: str) -> Mapping[str, str] | None:
        """Return the decisions for another process, ``None`` for the process that has decided."""
        return None if process == self.process else self.rows


@dataclass(frozen=True)
class Environment:
    """The values of the environment variables.

    Attributes:
        layers: a layer of settings per variable.
        path: the path of a file of settings, or ``None``.
        log: the level of logs, or ``None``.
        decision: the decisions of another process, or ``None``.
        report: the path of the file for the kernels that run in another program, or ``None``.
    """

    layers: Layers = ()
    path: str | None = None
    log: str | None = None
    decision: SharedDecision | None = None
    report: str | None = None

    @functools.cached_property
    def file(self) -> ConfigFile | None:
        """The file of settings, read at the first use. A scope with a file leaves it unread.

        Raises:
            ConfigError: the file cannot be used.
        """
        try:
            return read_file(self.path) if self.path else None
        except ConfigError as error:
            raise ConfigError(f"{CONFIG}: {error}") from error


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Read the variables of opgraft and of plugins, by default from ``os.environ``.

    Raises:
        ConfigError: a value is not allowed, or a variable with the prefix ``OPGRAFT_`` is unknown.
    """
    values = os.environ if variables is None else variables
    further = {n for n in values if n.startswith("OPGRAFT_") and n not in VARIABLES}
    # Few environments have variables of plugins. The others need not know the installed plugins.
    of_plugins = plugin_fields() if further else {}
    _expect_known(further, of_plugins)
    return Environment(
        layers=_layers(values, [*FIELDS.values(), *of_plugins.values()]),
        path=values.get(CONFIG),
        log=_log_level(values.get(LOG)),
        decision=_read_shared_decision(values.get(DECISION)),
        report=values.get(REPORT) or None,
    )


def known_variables() -> Mapping[str, str]:
    """Return each variable of opgraft and of installed plugins with the meaning."""
    of_plugins = {field.variable: field.help for field in plugin_fields().values()}
    return {**VARIABLES, **of_plugins}


def _expect_known(further: Iterable[str], of_plugins: Mapping[str, Field]) -> None:
    """Check the variables that are none of opgraft.

    Raises:
        ConfigError: no plugin has a setting with such a variable.
    """
    owners = {field.variable: field for field in of_plugins.values()}
    for variable in sorted(further):
        if variable in owners:
            continue
        # A name in the section of a plugin is compared with the settings of this plugin alone.
        beside = [field for field in owners.values() if variable.startswith(_prefix(field))]
        owner = f" of {beside[0].provider}" if beside else ""
        known = {field.variable for field in beside} or {*VARIABLES, *owners}
        raise ConfigError(
            f"unknown environment variable {variable}{owner}: {close_matches(variable, known)} "
            "Unset or rename it."
        )


def _prefix(field: Field) -> str:
    """Return the beginning of the variables of a plugin's section, such as ``OPGRAFT_ACME_``."""
    section = field.name.partition(".")[0]
    return f"OPGRAFT_{section.upper()}_"


def _read_shared_decision(text: str | None) -> SharedDecision | None:
    if not text:
        return None
    try:
        data = json.loads(text)
        rows = {str(name): str(value) for name, value in data["rows"].items()}
        shared = SharedDecision(str(data["process"]), rows)
        if data["digest"] != shared.digest:
            raise ValueError("its digest is that of other decisions")
        return shared
    # The text may be any JSON: a number has no rows, and a list has no items().
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{DECISION}={text!r:.80} is nothing that opgraft.share_decisions wrote: unset it"
        ) from error


def _layers(values: Mapping[str, str], fields: Iterable[Field]) -> Layers:
    """Return a layer per variable: the origin of a setting names the variable."""
    layers = []
    for field in fields:
        # An empty text is a value for a list only.
        text = values.get(field.variable)
        # An empty text, as from a misspelt variable of a script, would drop the lock in silence.
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


# These choose the kernels, and with them the bits of results.
_DECIDING = (PLATFORM, PLUGINS, PLUGINS_DISABLE, LOCKFILE, PROVIDERS)
_OF_TORCH = ("ATEN_", "DNNL_", "ONEDNN_", "TORCH_ALLOW_")
"""Beginnings of the names of variables that change computations of torch and its libraries."""


def deciding_variables(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the set variables that may change computations, by default of ``os.environ``."""
    values = os.environ if variables is None else variables
    return {
        name: value
        for name, value in values.items()
        if name in _DECIDING or name.startswith(_OF_TORCH)
    }


_OF_SESSIONS = re.compile(
    "_|PWD|OLDPWD|SHLVL|TERM|TERM_.*|COLORTERM|COLUMNS|LINES|WINDOWID|TMUX.*|STY|SSH_.*"
    # Pytest sets the name of the running test.
    "|XDG_SESSION_ID|PYTEST_.*"
)


def lasting_variables(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables, by default of ``os.environ``, without those of one terminal."""
    values = os.environ if variables is None else variables
    return {name: values[name] for name in sorted(values) if not _OF_SESSIONS.fullmatch(name)}


@dataclass(frozen=True)
class Launch:
    """The place of a process among the processes of a launcher such as ``torchrun``.

    Attributes:
        size: the number of processes on all hosts.
        local_rank: the number of this process on this host.
        local_size: the number of processes on this host; ``size`` if the launcher does not tell.
        rank: the number of this process among all.
        is_on_one_host: the launcher says that all processes are on this host.
    """

    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    rank: int = 0
    is_on_one_host: bool = True


def read_launch(variables: Mapping[str, str] | None = None) -> Launch:
    """Read the variables of launchers, by default from ``os.environ``.

    Without such variables, this process is alone.

    Raises:
        ConfigError: a value is no number, or a number of processes is 0.
    """
    values = os.environ if variables is None else variables
    size = _whole_number(values, "WORLD_SIZE", 1, least=1)
    local_rank = _whole_number(values, "LOCAL_RANK", 0)
    local_size = _whole_number(values, "LOCAL_WORLD_SIZE", size, least=1)
    # A launcher such as srun does not count the processes of a host.
    is_counted = size == 1 or bool(values.get("LOCAL_WORLD_SIZE"))
    rank = _whole_number(values, "RANK", 0)
    is_on_one_host = is_counted and local_size == size
    return Launch(size, local_rank, local_size, rank, is_on_one_host)


def _whole_number(values: Mapping[str, str], name: str, otherwise: int, least: int = 0) -> int:
    # A launcher may set a variable to an empty text.
    text = values.get(name) or str(otherwise)
    told = f"{name}={text!r:.80}"
    advice = "unset it, or start with a launcher, such as torchrun"
    # Not int() alone, which takes signs, spaces and "1_0", too.
    if not text.isdecimal():
        raise ConfigError(f"{told} is no number: {advice}")
    if int(text) < least:
        raise ConfigError(f"{told} is below {least}: {advice}")
    return int(text)


def read_simulated(variables: Mapping[str, str] | None = None) -> str:
    """Return the description of the simulated device; empty if there is none."""
    return (os.environ if variables is None else variables).get(SIMULATED_DEVICE, "")


_OF_COMPILERS = re.compile(
    "(TORCHINDUCTOR|TORCHDYNAMO|TORCH_COMPILE|ATEN|OMP|GOMP|KMP|MKL|ONEDNN|DNNL|TRITON)_.*"
    # Inductor compiles C++ with the compiler and the flags of the user.
    "|CC|CXX|C(XX|PP)?FLAGS|LDFLAGS|CPATH"
)
# The place of a cache changes no code, and differs between users and machines.
_FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def read_compilers(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that change the code of compilers, by default of ``os.environ``.

    The folders of their caches are left out.
    """
    values = os.environ if variables is None else variables
    return {
        name: values[name]
        for name in sorted(values)
        if _OF_COMPILERS.fullmatch(name) and name not in _FOLDERS
    }


@dataclass(frozen=True)
class OtlpExport:
    """Settings for sending spans to a receiver of OTLP over HTTP.

    Attributes:
        headers: of each request, by name and value.
        timeout: seconds for a request with further tries.
        compression: ``none``, ``gzip`` or ``deflate``.
        certificate: file of the certificates to trust, or ``None`` for those of the system.
        client_certificate: file of the client's own certificate, or ``None``.
        client_key: file of the key to this certificate, or ``None``.
        delay: seconds in which spans are collected for a request.
    """

    headers: tuple[tuple[str, str], ...] = ()
    timeout: float = 10.0
    compression: str = "none"
    certificate: str | None = None
    client_certificate: str | None = None
    client_key: str | None = None
    delay: float = 5.0


def read_otlp(variables: Mapping[str, str] | None = None) -> OtlpExport:
    """Read OpenTelemetry's variables for an exporter of spans, by default from ``os.environ``.

    Raises:
        ConfigError: a value is not allowed.
    """
    values = os.environ if variables is None else variables
    variable, text = _of_export(values, "COMPRESSION", "none")
    compression = text.lower()
    if compression not in _COMPRESSIONS:
        raise ConfigError(f"{variable} is {text!r:.80}: set one of " + ", ".join(_COMPRESSIONS))
    # OpenTelemetry gives this delay in milliseconds, and the timeout in seconds.
    delay = values.get("OTEL_BSP_SCHEDULE_DELAY") or "5000"
    return OtlpExport(
        headers=_headers(*_of_export(values, "HEADERS")),
        timeout=_duration(*_of_export(values, "TIMEOUT", "10")),
        compression=compression,
        certificate=_of_export(values, "CERTIFICATE")[1] or None,
        client_certificate=_of_export(values, "CLIENT_CERTIFICATE")[1] or None,
        client_key=_of_export(values, "CLIENT_KEY")[1] or None,
        delay=_duration("OTEL_BSP_SCHEDULE_DELAY", delay) / 1000,
    )


def _of_export(values: Mapping[str, str], name: str, otherwise: str = "") -> tuple[str, str]:
    """Return the variable that is set, and the text. The variable for spans alone goes first."""
    of_spans = f"OTEL_EXPORTER_OTLP_TRACES_{name}"
    of_all = f"OTEL_EXPORTER_OTLP_{name}"
    # OpenTelemetry asks programs to treat an empty variable like one that is not set.
    if values.get(of_spans):
        return of_spans, values[of_spans]
    return of_all, values.get(of_all) or otherwise


def _headers(variable: str, text: str) -> tuple[tuple[str, str], ...]:
    """Return names and values of headers. They may be secret: no message has the values.

    Raises:
        ConfigError: the text has something else.
    """
    found = []
    for pair in filter(None, map(str.strip, text.split(","))):
        name, equals, value = pair.partition("=")
        if not equals or not _TOKEN.fullmatch(name.strip()):
            raise ConfigError(
                f"{variable} is no list such as name=value,other=value, with values as in URLs"
            )
        # A line break in a header would let the value write headers of its own.
        given = unquote(value).strip()
        if not _HEADER.fullmatch(given):
            raise ConfigError(
                f"{variable} has a line break, a control character or a character beyond "
                f"Latin-1 in the value of {name.strip()}: leave it out ('base64 -w 0' breaks "
                "no lines)"
            )
        found.append((name.strip().lower(), given))
    return tuple(found)


def _duration(variable: str, text: str) -> float:
    try:
        duration = float(text)
    except ValueError:
        duration = -1.0
    # NaN is refused, too. Python's locks and sockets cannot wait any longer than TIMEOUT_MAX.
    if not 0 <= duration < threading.TIMEOUT_MAX:
        raise ConfigError(f"{variable}={text!r:.80} is no duration: give a number of at least 0")
    return duration


def cache_home(variables: Mapping[str, str] | None = None) -> Path:
    """Return the user's folder for caches, by default from ``os.environ``."""
    values = os.environ if variables is None else variables
    return Path(values.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def hub_cache(variables: Mapping[str, str] | None = None) -> Path:
    """Return the folder of models from the Hugging Face Hub, by default from ``os.environ``.

    The Hub's own library reads the same variables. They are no settings of opgraft.
    """
    values = os.environ if variables is None else variables
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if values.get(name):
            return Path(values[name]).expanduser()
    if values.get("HF_HOME"):
        return Path(values["HF_HOME"]).expanduser() / "hub"
    return cache_home(values).expanduser() / "huggingface" / "hub"


def state_home(variables: Mapping[str, str] | None = None) -> Path:
    """Return the user's folder for data that outlives a run, by default from ``os.environ``.

    Raises:
        RuntimeError: the user has no home folder.
    """
    values = os.environ if variables is None else variables
    return Path(values.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
