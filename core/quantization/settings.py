"""The choice of a model's quantization: from the settings, and from the checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from opgraft.config.sections import QuantizationSettings
from opgraft.errors import QuantizationError, QuantizationSettingError
from opgraft.ops.linear.parallel import LinearBase
from opgraft.ops.linear.quantization_config import QuantizationConfig
from opgraft.quantization.checkpoint import CheckpointConfig
from opgraft.quantization.patterns import Patterns, expect_used
from opgraft.quantization.registry import quantization_named
from torch import nn

GGUF = "gguf"
"""The quantization that settings may replace, as the blocks of the file can be read as numbers."""


class SettingsConfig(QuantizationConfig):
    """The quantization from settings: one for all layers, exceptions, and others by pattern.

    Args:
        whole: the quantization of layers without a pattern; ``None`` for plain layers.
        skip: patterns of plain layers.
        others: quantizations with patterns of layers. The first match decides.
        packed_modules_mapping: name of a merged layer → names of the layers inside.
        stored: name of a layer of the checkpoint → True if the weight is quantized.

    Attributes:
        taken: patterns of ``others`` with a quantized layer.
        refused: pattern of ``others`` → a message with a matching layer that stays plain.
    """

    def __init__(
        self,
        whole: QuantizationConfig | None,
        skip: Sequence[str],
        others: Sequence[tuple[QuantizationConfig, Sequence[str]]],
        packed_modules_mapping: Mapping[str, Iterable[str]],
        stored: Mapping[str, bool] | None = None,
    ) -> None:
        super().__init__()
        self.whole = whole
        self.skip = Patterns(skip, "quantization.skip")
        self.others = [
            (config, Patterns(patterns, "quantization.by_prefix")) for config, patterns in others
        ]
        self.taken: set[str] = set()
        self.refused: dict[str, str] = {}
        merged = {name: list(parts) for name, parts in packed_modules_mapping.items()}
        for config in (self, *self.configs):
            config.packed_modules_mapping = merged
            if isinstance(config, CheckpointConfig):
                config.stored = stored or {}
        # An embedding is quantized only if a pattern is its whole name.
        for config, patterns in others:
            config.embeddings = frozenset(patterns)

    @property
    def configs(self) -> list[QuantizationConfig]:
        """The quantizations to choose from."""
        found = [] if self.whole is None else [self.whole]
        return found + [config for config, _ in self.others]

    @property
    def patterns(self) -> list[Patterns]:
        """Patterns of the settings. Each needs a matching layer."""
        return [self.skip, *(patterns for _, patterns in self.others)]

    def get_name(self) -> str:
        return "+".join(dict.fromkeys(config.get_name() for config in self.configs))

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes common to all quantizations."""
        first, *others = [config.get_supported_act_dtypes() for config in self.configs]
        return [dtype for dtype in first if all(dtype in each for each in others)]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> QuantizationConfig:
        """Make the config from the constructor's arguments."""
        return cls(**config)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        merged = self.packed_modules_mapping
        if self.skip.match(prefix, merged):
            return None
        for config, patterns in self.others:
            if not patterns.match(prefix, merged):
                continue
            method = config.get_quant_method(layer, prefix)
            matching = patterns.answered(prefix, merged)
            if method is None:
                reason = f"{prefix} cannot take {config.get_name()}"
                self.refused |= dict.fromkeys(matching, reason)
            else:
                self.taken |= matching
            return method
        return None if self.whole is None else self.whole.get_quant_method(layer, prefix)


def choose_quantization(
    settings: QuantizationSettings,
    own: Mapping[str, Any],
    packed_modules_mapping: Mapping[str, Iterable[str]],
    stored: Mapping[str, bool] | None = None,
) -> QuantizationConfig | None:
    """Return the quantization for the layers of a model; ``None`` if all are plain.

    Args:
        settings: the section ``quantization``, resolved.
        own: the checkpoint's settings of the quantization, with the name as ``quant_method``;
            empty for a plain checkpoint.
        packed_modules_mapping: name of a merged layer → names of the layers inside.
        stored: name of a layer of the checkpoint, as in the model → True if the weight is
            quantized.

    Raises:
        QuantizationSettingError: a setting names an unknown quantization, or contradicts the
            checkpoint.
        QuantizationError: the checkpoint names an unknown quantization, or the quantization does
            not support torch's default dtype.
    """
    _expect_no_contradiction(settings, own)
    patterns_by_method: dict[str, list[str]] = {}
    for pattern, method in settings.by_prefix.items():
        patterns_by_method.setdefault(method, []).append(pattern)
    others = []
    for method, patterns in patterns_by_method.items():
        others.append((_made(method, own, "quantization.by_prefix"), patterns))
    whole = None
    of_checkpoint = _kept_quantization(own)
    if settings.method:
        whole = _made(settings.method, own, "quantization.method")
    elif of_checkpoint:
        whole = _made(of_checkpoint, own, "")
    if whole is None and not others:
        if settings.skip:
            raise QuantizationSettingError(
                "quantization.skip is set and nothing is quantized: set quantization.method, or "
                "take it out"
            )
        return None
    config = SettingsConfig(whole, settings.skip, others, packed_modules_mapping, stored)
    dtype = torch.get_default_dtype()
    supported = config.get_supported_act_dtypes()
    if dtype not in supported:
        raise QuantizationError(
            f"the quantization {config.get_name()} does not compute in {dtype}, but in "
            f"{', '.join(map(str, supported)) or 'no dtype that all of it supports'}: set "
            "model.dtype"
        )
    return config


def expect_patterns_used(model: nn.Module) -> None:
    """Refuse patterns of the settings without a layer in the constructed model.

    Raises:
        QuantizationSettingError: a pattern has no layer, or only layers that cannot take the
            method.
    """
    # Parts of a model may have configs of their own.
    configs: dict[int, SettingsConfig] = {}
    for module in model.modules():
        if isinstance(module, LinearBase) and isinstance(module.quant_config, SettingsConfig):
            configs[id(module.quant_config)] = module.quant_config
    expect_used(patterns for config in configs.values() for patterns in config.patterns)
    taken: set[str] = set()
    for config in configs.values():
        taken |= config.taken
    # A dictionary, as parts of a model may refuse a pattern for the same reason.
    refused: dict[str, None] = {}
    for config in configs.values():
        for pattern, reason in config.refused.items():
            if pattern not in taken:
                refused[f"{pattern!r}: {reason}"] = None
    if refused:
        raise QuantizationSettingError(
            f"quantization.by_prefix names what stays plain: {'; '.join(refused)}: take these "
            "patterns out, or name an embedding in full, with a method that it can take, such as "
            "int8"
        )


def _made(name: str, own: Mapping[str, Any], setting: str) -> QuantizationConfig:
    """Make the config of a quantization.

    Args:
        name: the name of the quantization.
        own: the checkpoint's settings.
        setting: the setting with the name; empty for a name from the checkpoint.
    """
    try:
        cls = quantization_named(name)
    except QuantizationError as error:
        if setting:
            raise QuantizationSettingError(f"{setting}: {error}") from error
        raise
    return cls.from_config(own if _is_own(name, own) else {})


def _is_own(name: str, own: Mapping[str, Any]) -> bool:
    """Return True if a name is that of the checkpoint's quantization."""
    return _normalised(name) == _normalised(own.get("quant_method"))


def _normalised(name: object) -> str:
    return str(name).lower().replace("-", "_")


def _kept_quantization(own: Mapping[str, Any]) -> str | None:
    """Return the quantization of a checkpoint if no other can load the checkpoint."""
    name = own.get("quant_method")
    return None if name is None or _normalised(name) == GGUF else str(name)


def _expect_no_contradiction(settings: QuantizationSettings, own: Mapping[str, Any]) -> None:
    """Refuse settings of another quantization than the checkpoint's."""
    name = _kept_quantization(own)
    if name is None:
        return
    contradictions = []
    if settings.method and not _is_own(settings.method, own):
        contradictions.append("quantization.method")
    if settings.skip:
        contradictions.append("quantization.skip")
    if settings.by_prefix:
        contradictions.append("quantization.by_prefix")
    if contradictions:
        raise QuantizationSettingError(
            f"the checkpoint is quantized already, by {name}, which {' and '.join(contradictions)} "
            "contradict: its weights are loaded as they are. Take the setting out, or take a "
            "plain checkpoint of the model"
        )
