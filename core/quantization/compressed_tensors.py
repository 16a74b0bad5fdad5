"""Checkpoints in the format of compressed-tensors, such as those of llm-compressor.

Groups of layers may have different layouts. The configuration is read here, as the library needs
newer versions of torch and Python than opgraft.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.errors import QuantizationError
from opgraft.ops.linear.methods import QuantizeMethodBase
from opgraft.ops.linear.quantization_config import QuantizationConfig
from opgraft.ops.linear.quantized import functional
from opgraft.quantization.checkpoint import (
    CheckpointConfig,
    GroupLinearMethod,
    Scales,
    codes_of,
    create_parameter,
    expect_groups,
    expect_settings,
    expect_words,
    group_size,
    name_list,
    replace,
    setting,
    unpack_words,
)
from opgraft.quantization.codes import Codes, stored
from opgraft.quantization.fp8 import Fp8LinearMethod, block_shape
from opgraft.quantization.patterns import Patterns
from torch import Tensor

NAME = "compressed-tensors"
LINEAR = "Linear"
"""The target for every linear layer."""
READ = frozenset({"quant_method", "format", "config_groups", "ignore", "sparsity_config"})
"""Settings with an effect."""
WITHOUT_EFFECT = frozenset(
    {
        "quantization_status",
        "global_compression_ratio",
        "version",
        "run_compressed",
        "kv_cache_scheme",
    }
)
"""Settings without an effect on numbers: ``cache.dtype`` decides about the cache."""

_DYNAMIC_INPUTS = {
    "type": "int",
    "num_bits": 8,
    "dynamic": True,
    "symmetric": True,
    "strategy": "token",
}
"""The settings of inputs that ``int8_dynamic_linear`` computes with."""


class Group:
    """Layers with the same quantization.

    Args:
        targets: patterns of names, or ``"Linear"`` for all.
        scheme: the group's settings.
        layout: the layout of weights in the checkpoint, unless the group has another.

    Raises:
        QuantizationError: the settings cannot be read.
    """

    def __init__(
        self, targets: Sequence[str], scheme: Mapping[str, Any], layout: str | None
    ) -> None:
        self.all = LINEAR in targets
        expressions = [target for target in targets if target.startswith("re:")]
        others = {LINEAR, *expressions}
        self.expressions = Patterns(expressions)
        self.names = Patterns([target for target in targets if target not in others])
        self.make = _method_of(scheme, scheme.get("format") or layout)


@PluggableClass.register("compressed_tensors")
class CompressedTensorsConfig(CheckpointConfig):
    """Weights in packed integers, 8-bit integers or fp8, by groups of layers.

    Args:
        groups: a layer takes the one that lists its name; else the first with a regular expression
            for the name; else the first that stands for all.
        ignore: patterns of plain layers in the checkpoint.
    """

    def __init__(self, groups: Sequence[Group], ignore: Sequence[str] = ()) -> None:
        super().__init__(ignore)
        self.groups = tuple(groups)

    def get_name(self) -> str:
        return NAME

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> QuantizationConfig:
        """Make the config from a checkpoint's ``config_groups``, ``format`` and ``ignore``.

        Raises:
            QuantizationError: a setting cannot be read.
        """
        expect_settings(NAME, config)
        setting(NAME, config.get("sparsity_config") or {}, "format", (None, "dense"))
        _expect_known(config, READ | WITHOUT_EFFECT)
        given = config.get("config_groups")
        are_groups = isinstance(given, Mapping) and all(
            isinstance(scheme, Mapping) for scheme in given.values()
        )
        if not are_groups:
            raise QuantizationError(
                f"the checkpoint's quantization {NAME} has config_groups {given!r:.200}"
            )
        groups = []
        for scheme in given.values():  # type: ignore[union-attr]
            targets = name_list(NAME, scheme, "targets")
            groups.append(Group(targets, scheme, config.get("format")))
        return cls(groups, name_list(NAME, config, "ignore"))

    def linear_method(self, prefix: str) -> QuantizeMethodBase | None:
        names = self.checkpoint_names(prefix)
        named = self._group_of_name(prefix) or self._group_of_all()
        groups = [self._group_of_name(name) or named for name in names]
        methods = [None if group is None else group.make() for group in groups]
        if any(not _are_alike(methods[0], other) for other in methods[1:]):
            raise QuantizationError(
                f"the checkpoint's quantization {NAME} has {', '.join(names)} in config_groups "
                "with different settings, or some in none, but they are one layer here, "
                f"{prefix}: take a checkpoint that quantizes all of them alike"
            )
        return methods[0]

    def _group_of_name(self, name: str) -> Group | None:
        """Return the group with a name; else the first with a matching regular expression."""
        # As in the library: a name counts more than an expression in an earlier group.
        for group in self.groups:
            if group.names.answered(name, {}):
                return group
        for group in self.groups:
            if group.expressions.answered(name, {}):
                return group
        return None

    def _group_of_all(self) -> Group | None:
        return next((group for group in self.groups if group.all), None)


def _are_alike(one: QuantizeMethodBase | None, other: QuantizeMethodBase | None) -> bool:
    """Return True if two weight methods hold weights in the same form."""
    if one is None or other is None:
        return one is other
    return type(one) is type(other) and vars(one) == vars(other)


def _expect_known(config: Mapping[str, Any], known: Collection[str]) -> None:
    unknown = []
    for key, value in config.items():
        # Files list settings of features that they do not use, as null or false.
        if value and key not in known:
            unknown.append(f"{key!r:.80}")
    if unknown:
        named = ", ".join(unknown)
        raise QuantizationError(
            f"the checkpoint's quantization {NAME} sets {named}, which cannot be read "
            "and may change what its weights mean: take a checkpoint without"
        )


def _method_of(scheme: Mapping[str, Any], layout: object) -> Callable[[], Any]:
    """Return the function that makes the weight methods of a group.

    Args:
        scheme: the group's settings.
        layout: the layout of weights in the checkpoint.

    Raises:
        QuantizationError: the settings or the layout cannot be read.
    """
    layout = layout.lower() if isinstance(layout, str) else layout
    _expect_known(scheme, ("targets", "weights", "input_activations", "format"))
    weights = scheme.get("weights") or {}
    inputs = scheme.get("input_activations")
    for key, value in (("weights", weights), ("input_activations", inputs or {})):
        if not isinstance(value, Mapping):
            raise QuantizationError(
                f"the checkpoint's quantization {NAME} has {key} {value!r:.80}, expected settings: "
                "correct it in the checkpoint's config"
            )
    kind = setting(NAME, weights, "type", ("int", "float"), "int")
    if layout == "pack-quantized" and kind == "int":
        return _packed(weights, inputs)
    if layout in ("int-quantized", "naive-quantized") and kind == "int":
        return _integers(weights, inputs)
    if layout in ("float-quantized", "naive-quantized") and kind == "float":
        return _floats(weights, inputs)
    raise QuantizationError(
        f"the checkpoint's quantization {NAME} has the format {layout!r:.80} with weights of type "
        f"{kind}, and pack-quantized, int-quantized and float-quantized can be read: take a "
        "checkpoint in another quantization"
    )


def _packed(weights: Mapping[str, Any], inputs: object) -> Callable[[], Any]:
    setting(NAME, {"input_activations": inputs}, "input_activations", (None,))
    # These values leave inputs in their order.
    setting(NAME, weights, "actorder", (None, "weight", "static", False))
    bits = setting(NAME, weights, "num_bits", (4, 8))
    symmetric = setting(NAME, weights, "symmetric", (True, False), True)
    strategy = setting(NAME, weights, "strategy", ("group", "channel"))
    size = group_size(NAME, weights) if strategy == "group" else -1
    return lambda: PackedLinearMethod(bits, size, symmetric)


def _integers(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> Callable[[], Any]:
    setting(NAME, weights, "num_bits", (8,))
    setting(NAME, weights, "symmetric", (True,), True)
    # int8_dynamic_linear has a scale for each output, and none for groups of inputs.
    strategies = ("channel", "tensor") if inputs else ("channel", "tensor", "group")
    scales = _scales_of(weights, strategies)
    if inputs is not None:
        for key, value in _DYNAMIC_INPUTS.items():
            setting(NAME, inputs, key, (value,))
    return lambda: IntegerLinearMethod(scales, inputs is not None)


def _floats(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> Callable[[], Any]:
    setting(NAME, weights, "num_bits", (8,))
    scales = _scales_of(weights, ("channel", "tensor", "block"))
    given = inputs or {}
    setting(NAME, given, "type", ("float",))
    setting(NAME, given, "num_bits", (8,))
    static = not setting(NAME, given, "dynamic", (True, False), False)
    if static:
        setting(NAME, given, "strategy", ("tensor",))
    if static and weights.get("strategy") == "block":
        raise QuantizationError(
            f"the checkpoint's quantization {NAME} has blocks and static scales of inputs: no op "
            "does"
        )
    return lambda: Fp8LinearMethod(scales, static)


def _scales_of(weights: Mapping[str, Any], strategies: Sequence[str]) -> Scales:
    strategy = setting(NAME, weights, "strategy", strategies)
    if strategy == "tensor":
        return Scales(None)
    if strategy == "block":
        return Scales(block_shape(NAME, weights.get("block_structure")))
    size = group_size(NAME, weights) if strategy == "group" else -1
    return Scales((1, size))


@PluggableClass.register("compressed_packed_linear_method")
class PackedLinearMethod(GroupLinearMethod):
    """Holds ``weight``, ``scales`` and ``offsets`` for ``quantized_linear``.

    A checkpoint has ``weight_packed`` ``[out_features, in_features · bits / 32]`` in ``int32``,
    ``weight_scale`` ``[out_features, groups]``, ``weight_shape`` and, unless symmetric,
    ``weight_zero_point`` ``[out_features · bits / 32, groups]`` in ``int32``. Codes and zeros are
    stored from 0.
    """

    def __init__(self, bits: int, group_size: int, symmetric: bool) -> None:
        self.bits = bits
        self.group_size = group_size
        self.symmetric = symmetric

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: Sequence[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        groups = expect_groups(layer, input_size_per_partition, self.group_size)
        in_word = 32 // self.bits
        rows = sum(output_partition_sizes)
        expect_words(layer, [input_size_per_partition], in_word, "inputs")
        shape = (rows, input_size_per_partition // in_word)
        words = {"packed_factor": in_word, "output_dim": 0, **extra_weight_attrs}
        cut = {} if self.group_size == -1 else {"input_dim": 1, "input_unit": self.group_size}
        create_parameter(
            layer, "weight_packed", shape, torch.int32, input_dim=1, packed_dim=1, **words
        )
        create_parameter(
            layer,
            "weight_scale",
            (rows, groups),
            torch.float32,
            output_dim=0,
            **cut,
            **extra_weight_attrs,
        )
        create_parameter(layer, "weight_shape", (2,), torch.int64, **extra_weight_attrs)
        if not self.symmetric:
            expect_words(layer, output_partition_sizes, in_word, "outputs")
            shape = (rows // in_word, groups)
            create_parameter(
                layer, "weight_zero_point", shape, torch.int32, packed_dim=0, **cut, **words
            )

    def process_weights_after_loading(self, layer: Any) -> None:
        numbers = unpack_words(layer.weight_packed.data, 1, self.bits)
        gone = ["weight_packed", "weight_scale", "weight_shape"]
        zeros = None
        if not self.symmetric:
            zeros = unpack_words(layer.weight_zero_point.data, 0, self.bits)
            gone.append("weight_zero_point")
        codes = codes_of(numbers, zeros, layer.weight_scale.data, self.bits)
        replace(layer, gone, stored([codes]))


@PluggableClass.register("compressed_integer_linear_method")
class IntegerLinearMethod(GroupLinearMethod):
    """Holds ``weight`` in ``int8``, and ``scales``.

    Args:
        scales: the form of ``weight_scale`` in the checkpoint.
        dynamic: inputs are quantized to 8 bits row by row.
    """

    def __init__(self, scales: Scales, dynamic: bool) -> None:
        self.scales = scales
        self.dynamic = dynamic

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: Sequence[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        shape = (sum(output_partition_sizes), input_size_per_partition)
        create_parameter(
            layer, "weight", shape, torch.int8, input_dim=1, output_dim=0, **extra_weight_attrs
        )
        self.scales.create(
            layer,
            "weight_scale",
            input_size_per_partition,
            output_partition_sizes,
            **extra_weight_attrs,
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        scales = self.scales.by_output(layer.weight_scale.data, layer.output_partition_sizes)
        replace(layer, ["weight_scale"], stored([Codes(layer.weight.data, scales)]))

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.dynamic:
            return functional.int8_dynamic_linear(x, layer.weight, layer.scales, bias)
        return super().apply(layer, x, bias)
