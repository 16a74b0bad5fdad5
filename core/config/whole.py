"""``OpgraftConfig``, the whole configuration; merge layers and find contradictions."""

from __future__ import annotations

import copy
import dataclasses
import enum
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from opgraft.config.compilation import (
    DEFAULT_LEVEL,
    LEVELS,
    OF_FULL,
    CompilationConfig,
    CompilationMode,
    CustomOpsSetting,
    is_packaged,
)
from opgraft.config.declaration import (
    Field,
    Section,
    all_fields,
    made_of,
    own_fields,
    setting,
    subsections,
    values_of,
)
from opgraft.config.plugin_settings import plugin_fields
from opgraft.config.sections import (
    CacheConfig,
    HandoverConfig,
    LoadConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    QuantizationSettings,
    SchedulerConfig,
    ServerConfig,
    ShadowConfig,
    SpeculationConfig,
)
from opgraft.errors import ConfigError, close_matches

NATIVE_CHOICE = "native"
"""The choice in ``providers`` for the op's own class with the native definition."""

_CUSTOM_OPS = "compilation_config.custom_ops"
"""The setting with names of ops, of which one layer gives all entries."""

_NO_NAMES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class OpgraftConfig(Section):
    """Every setting of opgraft. ``None`` means "not set here"; ``resolved()`` fills in defaults.

    Attributes:
        platform: the platform to use instead of the detected one. Decided once per process.
        plugins: allow list of plugins, by entry-point or distribution name; ``()`` means none. Read
            when plugins load.
        plugins_disable: deny list of plugins. Read when plugins load.
        strict: a failing plugin or probe raises. A call raises, too, if ``torch.compile`` would
            compile again after ``opgraft.compile``.
        check_values: ops check values of tensors, such as positions, on accelerators too, and wait
            for the device.
        cpu_keep_memory: on the CPU platform, glibc keeps freed memory in the process. Decided once
            per process.
        lockfile: a file with the pinned distributions of plugins and platforms. Read when the
            platform is decided.
        providers: op name → the entry-point or distribution name of a provider, or ``native``; or
            several names, of which the first that applies counts. A mapping, or text as on the
            command line.
        compilation_config, model, cache, scheduler, speculation, handover, lora, parallel, load,
            quantization, shadow, server: sections, see the classes.
        of_plugins: the settings of installed plugins by dotted name, such as ``acme.streams``.
            Read-only.
    """

    platform: str | None = setting(
        "the platform to use; decided once per process", unset="detected"
    )
    plugins: Sequence[str] | None = setting(
        "allow list of plugins, by entry-point or distribution name; each listed plugin must "
        "become active, and an empty list allows none",
        unset="all",
    )
    plugins_disable: Sequence[str] | None = setting(
        "deny list of plugins, by the same names", default=()
    )
    strict: bool | None = setting(
        "a failing plugin or probe raises, instead of being recorded, reported and left out; so "
        "does a call for which torch.compile would compile a model of opgraft.compile again",
        default=False,
    )
    check_values: bool | None = setting(
        "ops check values such as positions on accelerators too, which waits for the device",
        default=False,
    )
    cpu_keep_memory: bool | None = setting(
        "on the CPU platform, freed memory stays with the process; needs glibc, cannot be undone",
        default=False,
    )
    providers: Mapping[str, str | Sequence[str]] | None = setting(
        "by op name, the plugin or distribution whose replacement is used, or several: the first "
        "that applies; opgraft keeps the op's own class, native runs its native definition",
        default={},
    )
    compilation_config: CompilationConfig = dataclasses.field(default_factory=CompilationConfig)
    lockfile: str | None = setting(
        "file of 'opgraft plugins lock': plugins and platforms that are not in it, or have "
        "changed, are not imported",
        unset="none",
    )
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig, kw_only=True)
    cache: CacheConfig = dataclasses.field(default_factory=CacheConfig, kw_only=True)
    scheduler: SchedulerConfig = dataclasses.field(default_factory=SchedulerConfig, kw_only=True)
    speculation: SpeculationConfig = dataclasses.field(
        default_factory=SpeculationConfig, kw_only=True
    )
    handover: HandoverConfig = dataclasses.field(default_factory=HandoverConfig, kw_only=True)
    lora: LoRAConfig = dataclasses.field(default_factory=LoRAConfig, kw_only=True)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig, kw_only=True)
    load: LoadConfig = dataclasses.field(default_factory=LoadConfig, kw_only=True)
    quantization: QuantizationSettings = dataclasses.field(
        default_factory=QuantizationSettings, kw_only=True
    )
    shadow: ShadowConfig = dataclasses.field(default_factory=ShadowConfig, kw_only=True)
    server: ServerConfig = dataclasses.field(default_factory=ServerConfig, kw_only=True)
    of_plugins: Mapping[str, Any] = dataclasses.field(
        default_factory=dict, kw_only=True, hash=False
    )

    _scoped: ClassVar[Mapping[str, str] | None] = None
    """In a config of ``Settings.handed_down``, the scope of each field that a scope has set."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checked = {}
        for name, value in self.of_plugins.items():
            field = _plugin_field(name)
            checked[name] = None if value is None else field.check(value)
        # The only way to set a field of a frozen dataclass.
        object.__setattr__(self, "of_plugins", MappingProxyType(checked))

    def __getstate__(self) -> dict[str, Any]:
        # A read-only view cannot be pickled.
        return {**vars(self), "of_plugins": dict(self.of_plugins)}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        vars(self)["of_plugins"] = MappingProxyType(state["of_plugins"])

    def op_names(self) -> dict[str, list[str]]:
        """Return the names of ops in each field with such names. The ops may not exist yet."""
        setting = CustomOpsSetting.parse(self.compilation_config.custom_ops or ())
        return {
            "compilation_config.custom_ops": sorted(setting.on | setting.off),
            "providers": sorted(self.providers or ()),
        }

    def resolved(self) -> OpgraftConfig:
        """Return this config with built-in defaults for fields with ``None``.

        Code with a config for an argument reads the config through this method, so that
        ``OpgraftConfig()`` is enough for a call. The environment and scopes of ``set_config`` do
        not count: an entry point merges them in before. A complete config is returned as it is.

        Raises:
            ConfigError: two settings contradict each other.
        """
        if self._is_complete():
            return self
        return resolve([("the config", self)]).config

    def _is_complete(self) -> bool:
        """Return True if no default is missing."""
        # A plugin may have been installed since the config was made.
        if not plugin_fields().keys() <= self.of_plugins.keys():
            return False
        # A field without a default keeps None in a complete config, too.
        return all(value is not None or field.default is None for field, value in all_values(self))


FIELDS: Mapping[str, Field] = all_fields(OpgraftConfig)
"""Every setting of opgraft by its dotted name."""


def known_fields() -> Mapping[str, Field]:
    """Return every setting by dotted name: those of opgraft, then those of installed plugins."""
    return {**FIELDS, **plugin_fields()}


def all_values(config: OpgraftConfig) -> Iterator[tuple[Field, Any]]:
    """Yield each setting of a config with the value; ``None``: not set.

    Settings of plugins that the config does not hold are left out.

    Raises:
        ConfigError: no installed plugin has a setting of the config.
    """
    yield from values_of(config)
    for name, value in config.of_plugins.items():
        yield _plugin_field(name), value


def _plugin_field(name: str) -> Field:
    """Return a setting of a plugin.

    Raises:
        ConfigError: no installed plugin has the setting, or the setting is one of opgraft.
    """
    field = plugin_fields().get(name)
    if field is not None:
        return field
    check_known(name)
    raise ConfigError(f"{name} is no setting of a plugin: set the field of that name instead")


@dataclass(frozen=True)
class Settings:
    """Merged layers: a config with a value for every field, and the origin of each value.

    Attributes:
        config: the merged settings.
        origins: dotted name → the layer that set the field.
        scoped: dotted name of a field → the scope above the environment that set the field.
    """

    config: OpgraftConfig
    origins: Mapping[str, str]
    scoped: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def to_change(self, name: str, ways: str, addition: str = "") -> str:
        """Describe how to change a field.

        Args:
            name: the dotted name.
            ways: the answer if no scope sets the field.
            addition: an addition to the value in the scope; empty for a field with one value.
        """
        if name not in self.scoped:
            return ways
        what = f"add {addition}" if addition else "change it"
        scope = self.scoped[name]
        variable = known_fields()[name].variable
        return f"{name} is set by {scope}, which outranks {variable}: {what} there"

    def handed_down(self, whole: str = "") -> OpgraftConfig:
        """Return the config for a part of the program with a separate scope, such as an engine.

        Messages of the part name the scope of a field here, instead of the part's scope.

        Args:
            whole: the name of a scope for every field; empty if there is none.
        """
        scoped = dict.fromkeys(known_fields(), whole) if whole else {}
        scoped |= self.scoped

        # Not a field: two configs of equal settings are equal, whoever set them.
        config = copy.copy(self.config)
        vars(config)["_scoped"] = scoped
        return config

    def named(self, name: str) -> str:
        """Return the field's name with the origin of the value."""
        return f"{name} ({self.origins[name]})"

    def compiling(self, backend: str) -> OpgraftConfig:
        """Return the lowest layer for ``opgraft.compile``: default level and platform's backend.

        A value of any setting leaves the layer's value out.
        """

        def is_open(name: str) -> bool:
            return self.origins[f"compilation_config.{name}"] == "default"

        # A level fills in a mode, so a user's mode excludes the default level.
        level = DEFAULT_LEVEL if is_open("level") and is_open("mode") else None
        chosen = backend if is_open("backend") else None
        return OpgraftConfig(compilation_config=CompilationConfig(level=level, backend=chosen))

    def wanted_providers(self, op_name: str | None) -> tuple[str, ...]:
        """Return the names in ``providers`` for the registered name of an op or class."""
        wanted = (self.config.providers or {}).get(op_name or "", ())
        return (wanted,) if isinstance(wanted, str) else tuple(wanted)

    def chosen_provider(self, op_name: str | None) -> str | None:
        """Return the provider in ``providers`` for the registered name of an op or class.

        ``None`` if there is none, or if ``registry.choice.settled`` has yet to choose from a list.
        """
        wanted = self.wanted_providers(op_name)
        return wanted[0] if len(wanted) == 1 else None

    def with_provider(self, op_name: str, provider: str, origin: str) -> Settings:
        """Return the settings with a provider for one op, from another ``origin`` than a layer."""
        providers = dict(self.config.providers or {})
        providers[op_name] = provider
        config = dataclasses.replace(self.config, providers=providers)

        name = "providers"
        origins = {**self.origins, name: origin}
        # The value is no scope's any more.
        scoped = dict(self.scoped)
        scoped.pop(name, None)
        return Settings(config, origins, scoped)

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Yield the dotted name, the value as text for the command line, and the origin of each."""
        for field, value in all_values(self.config):
            yield field.name, text_of(value), self.origins[field.name]

    def enabled(self, op_name: str | None) -> tuple[bool, str]:
        """Return True if the op of a registered name is enabled, with the reason in words."""
        compilation = self.config.compilation_config
        setting = CustomOpsSetting.parse(compilation.custom_ops or ())
        origin = self.origins["compilation_config.custom_ops"]
        if self.chosen_provider(op_name) == NATIVE_CHOICE:
            return False, f"providers asks for {NATIVE_CHOICE!r} ({self.origins['providers']})"
        if op_name in setting.on:
            return True, f"'+{op_name}' in custom_ops ({origin})"
        if op_name in setting.off:
            return False, f"'-{op_name}' in custom_ops ({origin})"
        if setting.default is not None:
            word = "all" if setting.default else "none"
            return setting.default, f"{word!r} in custom_ops ({origin})"
        if self.leaves_to_compiler(op_name):
            mode = f"backend inductor compiles (mode {compilation.mode!s})"
            return False, f"custom_ops defaults to 'none': {mode}"
        return True, "custom_ops defaults to 'all'"

    def leaves_to_compiler(self, op_name: str | None) -> bool:
        """Return True if an op is disabled only for the backend to fuse the native definition."""
        compilation = self.config.compilation_config
        setting = CustomOpsSetting.parse(compilation.custom_ops or ())
        if setting.default is not None or op_name in setting.on | setting.off:
            return False
        compiles = compilation.backend == "inductor" and compilation.mode != CompilationMode.NONE
        return compiles and self.chosen_provider(op_name) != NATIVE_CHOICE


def text_of(value: Any) -> str:
    """Return the value of a setting as text for the command line; empty for ``None``."""
    if value is None:
        return ""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, str):
        return value
    return json.dumps(value, default=_name_of_class)


def _name_of_class(value: Any) -> str:
    """Return ``module:Class`` of a class, or of the class of an object."""
    cls = value if isinstance(value, type) else type(value)
    return f"{cls.__module__}:{cls.__qualname__}"


def resolve(
    layers: Iterable[tuple[str, OpgraftConfig]],
    scopes: Iterable[tuple[str, OpgraftConfig]] = (),
    op_names: Mapping[str, str] = _NO_NAMES,
) -> Settings:
    """Merge layers over the built-in defaults.

    Each section has the most derived class of all layers, so that settings of a subclass remain.

    Args:
        layers: configs with their origins in words, lowest first.
        scopes: further configs above the others.
        op_names: the name of a class → the registered name of its op. ``custom_ops`` of the result
            has registered names in place of these names.

    Raises:
        ConfigError: two settings contradict each other. The message names both and their origins,
            in the spelling of the layer.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    classes: dict[str, type[Section]] = dict(subsections(OpgraftConfig))
    # Both loops below need the scopes.
    within = tuple(scopes)
    for origin, config in (*layers, *within):
        _take_classes(config, classes)
        _take_values(config, origin, values, origins)

    # The level comes after all layers, as it fills only what no layer has set.
    _fill_by_level(values, origins)
    _leave_out_defaults(values, origins)
    _fill_by_defaults(values, origins, classes.values())
    switches = CustomOpsSetting.parse(values[_CUSTOM_OPS])
    # A copy: messages about contradictions quote the spellings of the layers.
    named = {**values, _CUSTOM_OPS: switches.with_op_names(op_names, origins[_CUSTOM_OPS])}
    config = made_of(OpgraftConfig, named, classes)
    of_plugins = {name: values[name] for name in plugin_fields()}
    vars(config)["of_plugins"] = MappingProxyType(of_plugins)
    _check_contradictions(config, values, origins)

    scoped: dict[str, str] = {}
    for origin, layer in within:
        scoped |= _set_by_scope(origin, layer)
    return Settings(config, origins, scoped)


def _take_classes(config: OpgraftConfig, classes: dict[str, type[Section]]) -> None:
    """Replace the class of each section by that of a layer, if the layer's class is a subclass."""
    for name, known in classes.items():
        given = type(getattr(config, name))
        if issubclass(given, known):
            classes[name] = given


def _take_values(
    config: OpgraftConfig, origin: str, values: dict[str, Any], origins: dict[str, str]
) -> None:
    """Replace values by those that a layer sets."""
    for field, value in all_values(config):
        if value is None:
            continue
        # prepare() copies: a resolved config shares no mutable value with others.
        values[field.name] = field.kind.prepare(value)
        origins[field.name] = origin


def _fill_by_defaults(
    values: dict[str, Any], origins: dict[str, str], classes: Iterable[type[Section]]
) -> None:
    """Fill fields without a value by built-in defaults."""
    fields: list[Field] = []
    sections: list[type[Section]] = [OpgraftConfig, *classes]
    for section in sections:
        fields += own_fields(section).values()
    fields += plugin_fields().values()
    for field in fields:
        if field.name in values:
            continue
        values[field.name] = field.kind.prepare(field.default)
        origins[field.name] = "default"


def _set_by_scope(origin: str, layer: OpgraftConfig) -> Mapping[str, str]:
    """Return the first scope of each field in a scope's layer."""
    if layer._scoped is not None:
        return layer._scoped
    return {field.name: origin for field, value in all_values(layer) if value is not None}


def _fill_by_level(values: dict[str, Any], origins: dict[str, str]) -> None:
    """Fill fields without a value by ``compilation_config.level``."""
    section = "compilation_config"
    level = values.get(f"{section}.level")
    if level is None:
        return
    choices = values.get("providers", {})
    native = {f"+{op}" for op, choice in choices.items() if choice == NATIVE_CHOICE}
    # The message about such a value must name the level, which is what the user has written.
    origin = f"{section}.level {level} ({origins[f'{section}.level']})"
    for attribute, value in LEVELS[level].items():
        name = f"{section}.{attribute}"
        if name in values:
            continue
        # The level must not enable an op with a provider chosen by hand.
        if attribute == "custom_ops":
            value = tuple(token for token in value if token not in native)
        values[name] = value
        origins[name] = origin


def _leave_out_defaults(values: dict[str, Any], origins: dict[str, str]) -> None:
    """Drop values of plugins and platforms for settings that the mode does not use."""
    mode = values.get("compilation_config.mode")
    # A user's value for such a setting is an error. A plugin cannot know the mode.
    unused = () if mode is CompilationMode.FULL else OF_FULL
    if not is_packaged(mode, values.get("compilation_config.backend", "inductor")):
        unused = (*unused, "cache")
    for attribute in unused:
        name = f"compilation_config.{attribute}"
        if origins.get(name, "").startswith(("plugin ", "platform ")):
            del values[name]
            del origins[name]


def config_from_fields(values: Mapping[str, Any]) -> OpgraftConfig:
    """Make a config from dotted field names.

    Example: ``{"compilation_config.custom_ops": ["none"]}``.

    Raises:
        ConfigError: a field is unknown, or a value is not allowed.
    """
    for name in values:
        check_known(name)
    own: dict[str, Any] = {}
    of_plugins: dict[str, Any] = {}
    of_sections: dict[str, dict[str, Any]] = {name: {} for name in subsections(OpgraftConfig)}
    for name, value in values.items():
        section, _, attribute = name.rpartition(".")
        if name not in FIELDS:
            of_plugins[name] = value
        elif section:
            of_sections[section][attribute] = value
        else:
            own[name] = value
    sections: dict[str, Any] = {}
    for section, cls in subsections(OpgraftConfig).items():
        sections[section] = cls(**of_sections[section])
    return OpgraftConfig(**own, **sections, of_plugins=of_plugins)


def check_known(name: str) -> None:
    """Check a dotted name.

    Raises:
        ConfigError: no setting has the name. The message has close matches.
    """
    # Most names need no look at the installed plugins.
    if name in FIELDS:
        return
    fields = known_fields()
    if name in fields:
        return
    beside = settings_beside(name)
    if beside:
        owner = next(iter(beside.values())).provider
        raise ConfigError(f"unknown setting {name!r} of {owner}: {close_matches(name, beside)}")
    meant = close_matches(name, fields)
    inner = [known for known in fields if known.rpartition(".")[2] == name]
    if inner:
        meant = f"did you mean {' or '.join(map(repr, inner))}?"
    raise ConfigError(f"unknown setting {name!r}: {meant}")


def settings_beside(name: str) -> Mapping[str, Field]:
    """Return the settings in the section of a plugin that a dotted name begins with, or none."""
    section = name.partition(".")[0]
    fields = plugin_fields().items()
    return {known: field for known, field in fields if known.startswith(f"{section}.")}


def parse_text(name: str, text: str, source: str = "") -> Any:
    """Parse the value of the field ``name``: JSON for lists and mappings, else plain text.

    Args:
        name: the dotted name of the field.
        text: the text of the value.
        source: the source of the text, such as an environment variable. Empty for the option of the
            command line.

    Raises:
        ConfigError: the field is unknown, the text has another form, or the value is not allowed.
            The message names the source.
    """
    check_known(name)
    option = f"--{name}"
    value = known_fields()[name].parse(text, source or option)
    try:
        # Some checks need the whole section, such as those of custom_ops.
        config_from_fields({name: value})
    except ConfigError as error:
        words = str(error)
        # An option has its name already.
        named = f"--{words}" if words.startswith(name) else f"{option}: {words}"
        raise ConfigError(f"{source}: {words}" if source else named) from error
    return value


def _long_prompts_fit(config: OpgraftConfig) -> bool:
    longest = config.model.max_model_len
    # With chunks, a long prompt takes several steps. The checkpoint's own length is not known here.
    if config.scheduler.chunked_prefill or longest is None:
        return True
    return longest <= config.scheduler.max_num_batched_tokens


def _requests_fit(config: OpgraftConfig) -> bool:
    return config.scheduler.max_num_seqs <= config.scheduler.max_num_batched_tokens


def _skipped_or_quantized(config: OpgraftConfig) -> bool:
    return not set(config.quantization.skip) & set(config.quantization.by_prefix)


def _choices_agree(config: OpgraftConfig) -> bool:
    switched = CustomOpsSetting.parse(config.compilation_config.custom_ops or ())
    native = set()
    plugins = set()
    for op, choice in (config.providers or {}).items():
        names = (choice,) if isinstance(choice, str) else tuple(choice)
        # The native definition applies everywhere, so at the head of a list nothing else is chosen.
        if names[0] == NATIVE_CHOICE:
            native.add(op)
        # A list with one of these may end in a definition that a disabled op runs, too.
        if not {NATIVE_CHOICE, "opgraft"} & set(names):
            plugins.add(op)
    return not (native & switched.on or plugins & switched.off)


def _drafts_change_no_bits(config: OpgraftConfig) -> bool:
    speculation = config.speculation
    wants_bits = speculation.method is not None and speculation.exact
    return config.model.batch_invariant or not wants_bits


def _handing_over_changes_no_bits(config: OpgraftConfig) -> bool:
    wants_bits = config.handover.tokens is not None and config.handover.exact
    return config.model.batch_invariant or not wants_bits


def _handed_blocks_are_found(config: OpgraftConfig) -> bool:
    return config.handover.tokens is None or config.cache.prefix_reuse


def _hands_over_on_this_host(config: OpgraftConfig) -> bool:
    elsewhere = config.parallel.executor in ("external", "ray")
    return config.handover.tokens is None or not elsewhere


def _hands_over_whole_models(config: OpgraftConfig) -> bool:
    return config.handover.tokens is None or not config.parallel.in_rounds


def _adapters_fit(config: OpgraftConfig) -> bool:
    kept = config.lora.max_cpu_loras
    return kept is None or kept >= config.lora.max_loras


def _adapters_are_enabled(config: OpgraftConfig) -> bool:
    return config.lora.enabled or not config.server.lora_modules


def _level_is_of_mode(config: OpgraftConfig) -> bool:
    level, mode = config.compilation_config.level, config.compilation_config.mode
    return level is None or mode is None or mode is LEVELS[level]["mode"]


_RULES: tuple[tuple[tuple[str, ...], Callable[[OpgraftConfig], bool], str], ...] = (
    (
        ("scheduler.max_num_batched_tokens", "model.max_model_len", "scheduler.chunked_prefill"),
        _long_prompts_fit,
        "a prompt that fills the context would never fit into a step: raise the budget, shorten "
        "the context, or let prompts come in chunks",
    ),
    (
        ("scheduler.max_num_seqs", "scheduler.max_num_batched_tokens"),
        _requests_fit,
        "each request takes a token of a step: raise the budget, or run fewer at once",
    ),
    (
        ("speculation.method", "speculation.exact", "model.batch_invariant"),
        _drafts_change_no_bits,
        "a step with drafts has more rows, and kernels may round differently for more rows: set "
        "model.batch_invariant to true, and tokens have the same bits as without drafts; or set "
        "speculation.exact to false, and a token may differ where two are nearly equally likely",
    ),
    (
        ("handover.tokens", "handover.exact", "model.batch_invariant"),
        _handing_over_changes_no_bits,
        "a second process computes a prompt in other steps, in which kernels may round "
        "differently: set model.batch_invariant to true, and tokens have the same bits whoever "
        "computes the prompt; or set handover.exact to false, and a token may differ where two are "
        "nearly equally likely",
    ),
    (
        ("handover.tokens", "cache.prefix_reuse"),
        _handed_blocks_are_found,
        "nobody would look for the blocks of the second process: turn prefix_reuse on, or leave "
        "handover.tokens out",
    ),
    (
        ("handover.tokens", "parallel.executor"),
        _hands_over_on_this_host,
        "the second process runs on this host, beside workers of this host: leave one of them out",
    ),
    (
        ("handover.tokens", "parallel.data", "parallel.expert"),
        _hands_over_whole_models,
        "replicas that share experts make steps together, and a second process would be none of "
        "them: leave handover.tokens out, or share no experts",
    ),
    (
        ("quantization.skip", "quantization.by_prefix"),
        _skipped_or_quantized,
        "a prefix is either skipped or quantized: take it out of one of them",
    ),
    (
        ("providers", "compilation_config.custom_ops"),
        _choices_agree,
        "an op that is chosen as native is not enabled by +op, and one that a plugin is chosen for"
        " is not disabled by -op: take it out of one of them",
    ),
    (
        ("lora.max_cpu_loras", "lora.max_loras"),
        _adapters_fit,
        "adapters that run are in memory: raise max_cpu_loras, or lower max_loras",
    ),
    (
        ("server.lora_modules", "lora.enabled"),
        _adapters_are_enabled,
        "requests may name the adapters only if lora.enabled is true: set it, or leave them out",
    ),
    (
        ("compilation_config.level", "compilation_config.mode"),
        _level_is_of_mode,
        "level 0 compiles nothing, and those above it are of the mode FULL: leave one of them out,"
        " or set both alike",
    ),
)
"""Settings that can contradict each other, the test, and the reason with the way out."""


def _check_contradictions(
    config: OpgraftConfig, values: Mapping[str, Any], origins: Mapping[str, str]
) -> None:
    """Check the rules about settings that can contradict each other.

    Args:
        config: the merged settings.
        values: each setting for the message, in the spelling of the layer.
        origins: the origin of each setting.

    Raises:
        ConfigError: a rule does not hold.
    """
    for names, holds, reason in _RULES:
        if holds(config):
            continue
        stated = [f"{name} = {text_of(values[name])} ({origins[name]})" for name in names]
        raise ConfigError(
            f"settings contradict each other: {', '.join(stated)}. {reason[0].upper()}{reason[1:]}."
        )
