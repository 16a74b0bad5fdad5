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
"""Quantizations of checkpoints that stay on request only: the blocks can be read as numbers."""


class SettingsConfig(QuantizationConfig):
    """The quantization from settings: a method for all layers, none for some, others by pattern.

    Args:
        whole: for layers without a pattern; ``None`` for plain layers.
        skip: patterns of plain layers.
        others: the choice for layers with a matching pattern; the first match decides.
        packed_modules_mapping: name of a merged layer → names of the layers inside.
        stored: name of a layer of the checkpoint → True if the weight is quantized.

    Attributes:
        taken: patterns of ``others`` with a layer.
        refused: pattern of ``others`` → a matching layer, and the method that the layer cannot
            take.
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

        for config in self.configs:
            config.packed_modules_mapping = merged
            if isinstance(config, CheckpointConfig):
                config.stored = stored or {}

        for config, patterns in others:
            config.embeddings = frozenset(patterns)

    @property
    def configs(self) -> list[QuantizationConfig]:
        """This one, and the ones to choose from."""
        return [self, *filter(None, [self.whole]), *(config for config, _ in self.others)]

    @property
    def patterns(self) -> list[Patterns]:
        """Patterns of the settings. Each needs a matching layer."""
        return [self.skip, *(patterns for _, patterns in self.others)]

    def get_name(self) -> str:
        return "+".join(dict.fromkeys(config.get_name() for config in self.configs[1:]))

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes common to all quantizations."""
        supported = [config.get_supported_act_dtypes() for config in self.configs[1:]]
        return [dtype for dtype in supported[0] if all(dtype in others for others in supported)]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> QuantizationConfig:
        """Make the config from the constructor's arguments."""
        return cls(**config)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        merged = self.packed_modules_mapping
        if self.skip.match(prefix, merged):
            return None

        for config, patterns in self.others:
            if patterns.match(prefix, merged):
                method = config.get_quant_method(layer, prefix)
                answered = patterns.answered(prefix, merged)
                if method is None:
                    self.refused |= dict.fromkeys(
                        answered, f"{prefix} cannot take {config.get_name()}"
                    )
                else:
                    self.taken |= answered
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
        QuantizationError: the checkpoint names an unknown one, or the quantization does not
            support torch's default dtype.
    """
    _expect_no_contradiction(settings, own)
    name = settings.method or _kept(own)
    methods = dict.fromkeys(settings.by_prefix.values())
    others = [
        (
            _made(method, own, "quantization.by_prefix"),
            [p for p, m in settings.by_prefix.items() if m == method],
        )
        for method in methods
    ]
    whole = _made(name, own, "quantization.method" if settings.method else "") if name else None
    if whole is None and not others:
        if settings.skip:
            raise QuantizationSettingError(
                "quantization.skip is set and nothing is quantized: set quantization.method, or "
                "take it out"
            )
        return None

    config = SettingsConfig(whole, settings.skip, others, packed_modules_mapping, stored)
    dtype, supported = torch.get_default_dtype(), config.get_supported_act_dtypes()
    if dtype not in supported:
        raise QuantizationError(
            f"the quantization {config.get_name()} does not compute in {dtype}, but in "
            f"{', '.join(map(str, supported)) or 'no dtype that all of it supports'}: set "
            "model.dtype"
        )

    return config


def expect_patterns_used(model: nn.Module) -> None:
    """Check for a layer of the constructed model for each pattern of the settings.

    Raises:
        QuantizationSettingError: a pattern has no layer, or only layers that cannot take the
            method.
    """
    layers = [module for module in model.modules() if isinstance(module, LinearBase)]
    by_id = {id(layer.quant_config): layer.quant_config for layer in layers}
    configs = [config for config in by_id.values() if isinstance(config, SettingsConfig)]
    expect_used(patterns for config in configs for patterns in config.patterns)
    taken = {pattern for config in configs for pattern in config.taken}
    refused = [
        f"{p!r}: {why}" for config in configs for p, why in config.refused.items() if p not in taken
    ]
    if refused:
        raise QuantizationSettingError(
            f"quantization.by_prefix names what stays plain: {'; '.join(dict.fromkeys(refused))}: "
            "take these patterns out, or name an embedding in full, with a method that it can "
            "take, such as int8"
        )


def _made(name: str, own: Mapping[str, Any], setting: str) -> QuantizationConfig:
    """Make the config of a quantization, named by a setting or by the checkpoint."""
    try:
        cls = quantization_named(name)
    except QuantizationError as error:
        if setting:
            raise QuantizationSettingError(f"{setting}: {error}") from error
        raise
    return cls.from_config(own if _is_own(name, own) else {})


def _is_own(name: str, own: Mapping[str, Any]) -> bool:
    return _spelled(name) == _spelled(own.get("quant_method"))


def _spelled(name: object) -> str:
    return str(name).lower().replace("-", "_")


def _kept(own: Mapping[str, Any]) -> str | None:
    """Return the quantization of a checkpoint if no other can load the checkpoint."""
    name = own.get("quant_method")
    return None if name is None or _spelled(name) == GGUF else str(name)


def _expect_no_contradiction(settings: QuantizationSettings, own: Mapping[str, Any]) -> None:
    name = _kept(own)
    if name is None:
        return

    others = {
        "quantization.method": settings.method and not _is_own(settings.method, own),
        "quantization.skip": settings.skip,
        "quantization.by_prefix": settings.by_prefix,
    }
    if contradictions := [setting for setting, against in others.items() if against]:
        raise QuantizationSettingError(
            f"the checkpoint is quantized already, by {name}, which {' and '.join(contradictions)} "
            "contradict: its weights are loaded as they are. Take the setting out, or take a "
            "plain checkpoint of the model"
        )
