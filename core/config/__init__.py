"""The configuration object, with layers and scopes.

A field with ``None`` is not set in a layer. The layers, highest first: scopes of ``set_config``
(inner before outer; the command line is one), the environment, a file, plugins, the platform, the
built-in defaults.
"""

from __future__ import annotations

from opgraft.config.compilation import CompilationConfig, CompilationMode, CustomOpsSetting
from opgraft.config.declaration import FLAG_WORDS, Field, Section, setting
from opgraft.config.files import ConfigFile, Layers, read_file
from opgraft.config.plugin_settings import plugin_fields
from opgraft.config.scope import CURRENT_SCOPE, Scope, set_config
from opgraft.config.sections import (
    CacheConfig,
    HandoverConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    QuantizationSettings,
    SchedulerConfig,
    ServerConfig,
    ShadowConfig,
    SpeculationConfig,
)
from opgraft.config.whole import (
    FIELDS,
    NATIVE_CHOICE,
    OpgraftConfig,
    Settings,
    config_from_fields,
    known_fields,
    parse_text,
    resolve,
    text_of,
)

__all__ = [
    "CURRENT_SCOPE",
    "FIELDS",
    "FLAG_WORDS",
    "NATIVE_CHOICE",
    "CacheConfig",
    "CompilationConfig",
    "CompilationMode",
    "ConfigFile",
    "CustomOpsSetting",
    "Field",
    "HandoverConfig",
    "Layers",
    "LoadConfig",
    "ModelConfig",
    "OpgraftConfig",
    "ParallelConfig",
    "QuantizationSettings",
    "SchedulerConfig",
    "Scope",
    "Section",
    "ServerConfig",
    "Settings",
    "ShadowConfig",
    "SpeculationConfig",
    "config_from_fields",
    "known_fields",
    "parse_text",
    "plugin_fields",
    "read_file",
    "resolve",
    "set_config",
    "setting",
    "text_of",
]
