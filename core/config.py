"""One configuration object, its layers and its scope.

A field that is ``None`` is not set in that layer. Layers, highest first: ``set_config`` scopes (inner before outer; the
command line is one), the environment, plugins, the platform, the built-in defaults.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from opgraft.caches import Caches
from opgraft.environment import (
    CHECK_VALUES,
    CPU_KEEP_MEMORY,
    CUSTOM_OPS,
    PLATFORM,
    PLUGINS,
    PLUGINS_DISABLE,
    PROVIDERS,
    STRICT,
    Environment,
    parse_flag,
    parse_providers,
)
from opgraft.errors import ConfigError, close_matches


class CompilationMode(enum.IntEnum):
    """The way in which a model built under this config is meant to be compiled; vLLM's names and numbers.

    ``NONE``: not at all. ``STOCK_TORCH_COMPILE``: by ``torch.compile``. ``DYNAMO_TRACE_ONCE``: by one trace of Dynamo,
    without its guards. ``FULL``, which vLLM calls ``VLLM_COMPILE``: by the host's own passes and pieces.
    ``TORCH_COMPILE`` is the older name of ``STOCK_TORCH_COMPILE``. Today only ``NONE`` differs from the others: they
    let custom ops default to ``none`` where ``backend`` is ``inductor``.
    """

    NONE = 0
    STOCK_TORCH_COMPILE = 1
    DYNAMO_TRACE_ONCE = 2
    FULL = 3
    TORCH_COMPILE = 1
    VLLM_COMPILE = 3


@dataclass(frozen=True)
class CompilationConfig:
    """The settings of compilation, and of which custom ops are enabled.

    Attributes:
        custom_ops: ``all`` or ``none`` (one of them at most), ``+op``, ``-op``; ``["none,+a"]`` is ``["none", "+a"]``.
            Without either, ``none`` holds if ``backend`` is ``inductor`` and ``mode`` is not ``NONE``, else ``all``.
        backend: name of the ``torch.compile`` backend.
        mode: a ``CompilationMode``, its name or its number.
    """

    custom_ops: Sequence[str] | None = None
    backend: str | None = None
    mode: CompilationMode | None = None

    def __post_init__(self) -> None:
        if self.custom_ops is not None:
            object.__setattr__(self, "custom_ops", CustomOpsSetting.parse(self.custom_ops).tokens)
        object.__setattr__(self, "mode", _mode(self.mode))
        _check_text("compilation_config.backend", self.backend)


FLAGS = ("strict", "check_values", "cpu_keep_memory")
"""The settings that are switches."""


@dataclass(frozen=True)
class OpgraftConfig:
    """Every setting of opgraft; ``None`` means "not set here".

    Attributes:
        platform: name of the platform to use instead of the detected one. Decided once per process.
        plugins: allow list of plugins, by entry-point or distribution name; ``()`` means none. Read when plugins load.
        plugins_disable: deny list of plugins, likewise.
        strict: whether a failing plugin or probe raises.
        check_values: whether ops check values of tensors, such as positions, on accelerators too, which then must wait.
        cpu_keep_memory: whether the CPU platform has glibc keep freed memory in the process. Decided once per process.
        providers: op name to the entry-point or distribution name of the provider whose replacement is to be used.
        compilation_config: see ``CompilationConfig``.
    """

    platform: str | None = None
    plugins: Sequence[str] | None = None
    plugins_disable: Sequence[str] | None = None
    strict: bool | None = None
    check_values: bool | None = None
    cpu_keep_memory: bool | None = None
    providers: Mapping[str, str] | None = None
    compilation_config: CompilationConfig = dataclasses.field(default_factory=CompilationConfig)

    def __post_init__(self) -> None:
        _check_text("platform", self.platform)
        for name in ("plugins", "plugins_disable"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _names(name, value))
        for name in FLAGS:
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise ConfigError(f"{name} is {value!r}: use True or False")
        if self.providers is not None:
            _check_providers(self.providers)
        if not isinstance(self.compilation_config, CompilationConfig):
            raise ConfigError(f"compilation_config is {self.compilation_config!r}: use a CompilationConfig")

    def op_names(self) -> dict[str, list[str]]:
        """Map a field to the names of ops that it mentions; whether they exist is known once plugins are loaded."""
        setting = CustomOpsSetting.parse(self.compilation_config.custom_ops or ())
        return {
            "compilation_config.custom_ops": sorted(setting.on | setting.off),
            "providers": sorted(self.providers or ()),
        }


@dataclass(frozen=True)
class CustomOpsSetting:
    """A parsed ``custom_ops``: the default (``None`` where not stated) and the ops switched on and off by name."""

    tokens: tuple[str, ...]
    default: bool | None
    on: frozenset[str]
    off: frozenset[str]

    @classmethod
    def parse(cls, value: Sequence[str]) -> CustomOpsSetting:
        """Parse tokens, each possibly several joined by commas.

        Raises:
            ConfigError: a token of another form, ``all`` with ``none``, or ``+x`` with ``-x``.
        """
        tokens = tuple(part.strip() for name in _names("custom_ops", value) for part in name.split(",") if part.strip())
        wrong = [t for t in tokens if t not in ("all", "none") and not (t[0] in "+-" and len(t) > 1)]
        if wrong:
            raise ConfigError(
                f"custom_ops has {wrong[0]!r}: each entry is 'all', 'none', '+op' or '-op' (got {tokens})"
            )
        if "all" in tokens and "none" in tokens:
            raise ConfigError(f"custom_ops has both 'all' and 'none' (got {tokens}): keep one of them")
        on = frozenset(token[1:] for token in tokens if token[0] == "+")
        off = frozenset(token[1:] for token in tokens if token[0] == "-")
        if on & off:
            name = min(on & off)
            raise ConfigError(f"custom_ops has both '+{name}' and '-{name}' (got {tokens}): keep one of them")
        default = True if "all" in tokens else False if "none" in tokens else None
        return cls(tokens, default, on, off)


@dataclass(frozen=True)
class Settings:
    """The layers merged: a config with every field set, and for each dotted field name the layer that set it."""

    config: OpgraftConfig
    origins: Mapping[str, str]

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Yield every setting by its dotted name, its value as the command line takes it, and the layer that set it."""
        for name, value in _flat(self.config):
            text = (
                value.name if isinstance(value, enum.Enum) else value if isinstance(value, str) else json.dumps(value)
            )
            yield name, "" if value is None else text, self.origins[name]

    def enabled(self, op_name: str | None) -> tuple[bool, str]:
        """Decide whether the custom op of that registered name is enabled, and give the reason in words."""
        compilation = self.config.compilation_config
        setting = CustomOpsSetting.parse(compilation.custom_ops or ())
        origin = self.origins["compilation_config.custom_ops"]
        if op_name in setting.on:
            return True, f"'+{op_name}' in custom_ops ({origin})"
        if op_name in setting.off:
            return False, f"'-{op_name}' in custom_ops ({origin})"
        if setting.default is not None:
            return setting.default, f"{'all' if setting.default else 'none'!r} in custom_ops ({origin})"
        if compilation.backend == "inductor" and compilation.mode != CompilationMode.NONE:
            return False, f"custom_ops defaults to 'none': backend inductor compiles (mode {compilation.mode!s})"
        return True, "custom_ops defaults to 'all'"


def resolve(layers: Iterable[tuple[str, OpgraftConfig]]) -> Settings:
    """Merge layers, lowest first, each with the words that name its origin, over the built-in defaults."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, config in (("default", BUILT_IN_DEFAULTS), *layers):
        for name, value in _flat(config):
            if value is not None or name not in values:
                values[name] = value
                origins[name] = origin
    return Settings(config_from_fields(values), origins)


def config_from_fields(values: Mapping[str, Any]) -> OpgraftConfig:
    """Make a config from dotted field names, such as ``{"compilation_config.custom_ops": ["none"]}``.

    Raises:
        ConfigError: an unknown field, with close matches, or a value that its field does not take.
    """
    for name in values:
        if name not in FIELDS:
            raise ConfigError(f"unknown setting {name!r}: {close_matches(name, FIELDS)}")
    prefix = "compilation_config."
    inner = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
    outer = {name: value for name, value in values.items() if not name.startswith(prefix)}
    return OpgraftConfig(**outer, compilation_config=CompilationConfig(**inner))


def environment_config(environment: Environment) -> tuple[tuple[str, OpgraftConfig], ...]:
    """Read the environment as layers, one per variable that is set, so that a setting's origin names its variable."""
    fields = {
        PLATFORM: ("platform", environment.platform),
        PLUGINS: ("plugins", environment.plugins),
        PLUGINS_DISABLE: ("plugins_disable", environment.plugins_disable),
        STRICT: ("strict", environment.strict),
        CHECK_VALUES: ("check_values", environment.check_values),
        CPU_KEEP_MEMORY: ("cpu_keep_memory", environment.cpu_keep_memory),
        PROVIDERS: ("providers", environment.providers),
        CUSTOM_OPS: ("compilation_config.custom_ops", environment.custom_ops),
    }
    layers = []
    for variable, (name, value) in fields.items():
        if value is not None:
            try:
                layers.append((variable, config_from_fields({name: value})))
            except ConfigError as error:
                raise ConfigError(f"{variable}: {error}") from error
    return tuple(layers)


class Scope:
    """An active ``set_config``: its own layers below those of the scopes inside it, and what was decided under it."""

    def __init__(self, layers: tuple[tuple[str, OpgraftConfig], ...]) -> None:
        self.layers = layers
        self.caches = Caches()
        self.generation = -1


CURRENT_SCOPE: ContextVar[Scope | None] = ContextVar("opgraft_scope", default=None)


@contextmanager
def set_config(config: OpgraftConfig, *, origin: str = "set_config") -> Iterator[None]:
    """Use ``config`` for what is constructed within the block, over enclosing scopes, the environment and defaults."""
    if not isinstance(config, OpgraftConfig):
        raise ConfigError(f"set_config takes an OpgraftConfig, got {type(config).__name__}")
    outer = CURRENT_SCOPE.get()
    layers = (*(outer.layers if outer else ()), (origin, config))
    token = CURRENT_SCOPE.set(Scope(layers))
    try:
        yield
    finally:
        CURRENT_SCOPE.reset(token)


def _flat(config: OpgraftConfig) -> Iterator[tuple[str, Any]]:
    for name in FIELDS:
        value: Any = config
        for part in name.split("."):
            value = getattr(value, part)
        yield name, value


def parse_text(name: str, text: str) -> Any:
    """Parse the value of the field ``name`` from a command line: JSON for lists and mappings, else plain text."""
    if name not in FIELDS:
        raise ConfigError(f"unknown setting {name!r}: {close_matches(name, FIELDS)}")
    try:
        return FIELDS[name](text)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--{name} {text!r} is not valid JSON: {error}") from error


def _text_list(text: str) -> Any:
    return json.loads(text) if text.lstrip().startswith("[") else [part for part in text.split(",") if part.strip()]


def _text_flag(name: str) -> Callable[[str], bool]:
    return functools.partial(parse_flag, f"--{name}")


FIELDS: Mapping[str, Callable[[str], Any]] = {
    "platform": str,
    "plugins": _text_list,
    "plugins_disable": _text_list,
    **{name: _text_flag(name) for name in FLAGS},
    "providers": functools.partial(parse_providers, "--providers"),
    "compilation_config.custom_ops": _text_list,
    "compilation_config.backend": str,
    "compilation_config.mode": str,
}
"""Every setting by its dotted name, with the function that reads it from a command line."""


def _check_text(name: str, value: object) -> None:
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{name} is {value!r}: use a string")


def _check_providers(value: object) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(text, str) for item in value.items() for text in item):
        raise ConfigError(f"providers is {value!r}: use a mapping of op name to provider name")


def _names(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(v, str) for v in value):
        raise ConfigError(f"{name} is {value!r}: use a list of strings")
    return tuple(value)


def _mode(value: object) -> CompilationMode | None:
    if value is None or isinstance(value, CompilationMode):
        return value
    names = CompilationMode.__members__
    text = str(value)
    if text.upper() in names:
        return names[text.upper()]
    if re.fullmatch("[0-9]", text) and int(text) in tuple(CompilationMode):
        return CompilationMode(int(text))
    raise ConfigError(f"compilation_config.mode is {value!r}: use one of {', '.join(names)} or a number from 0 to 3")


BUILT_IN_DEFAULTS = OpgraftConfig(
    plugins_disable=(),
    strict=False,
    check_values=False,
    cpu_keep_memory=False,
    providers={},
    compilation_config=CompilationConfig(custom_ops=(), backend="inductor", mode=CompilationMode.NONE),
)
