"""Checkpoints of GPTQ (Frantar et al., arXiv:2210.17323), from AutoGPTQ and GPTQModel."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.errors import QuantizationError
from opgraft.ops.linear.methods import QuantizeMethodBase
from opgraft.ops.linear.quantization_config import QuantizationConfig
from opgraft.quantization.checkpoint import (
    CheckpointConfig,
    GroupLinearMethod,
    codes_of,
    create_group_scales,
    create_parameter,
    cut_of_groups,
    expect_groups,
    expect_settings,
    expect_words,
    group_size,
    head_is_quantized,
    not_converted,
    replace,
    setting,
    unpack_words,
)
from opgraft.quantization.codes import stored
from torch import Tensor

GROUP = 128
"""Inputs of a group if the checkpoint does not say."""


@dataclass(frozen=True)
class WeightForm:
    """Settings of a quantized weight.

    Attributes:
        bits: bits of a number.
        group_size: inputs of a group, -1 for all.
        by_activation: the order of activations (``desc_act``) groups inputs, not the order of
            inputs.
        first_zero: the zero for a stored 0: 1 in the format ``gptq``, 0 in ``gptq_v2``.
        symmetric: every zero is ``2 ** (bits - 1)``; ``None`` if the checkpoint does not say.
    """

    bits: int
    group_size: int
    by_activation: bool = False
    first_zero: int = 1
    symmetric: bool | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> WeightForm:
        """Read the form from a checkpoint's settings.

        Raises:
            QuantizationError: a setting cannot be read.
        """
        bits = setting("gptq", config, "bits", (4, 8))
        by_activation = setting("gptq", config, "desc_act", (False, True), False)
        symmetric = setting("gptq", config, "sym", (None, False, True))
        setting("gptq", config, "pack_dtype", ("int32", "torch.int32"), "int32")
        # AutoGPTQ names the layout of Marlin by a setting of its own.
        setting(
            "gptq",
            config,
            "is_marlin_format",
            (False,),
            default=False,
        )
        # The name is "format" since transformers 5.0, which prefers the older name.
        older = config.get("checkpoint_format") is not None
        key = "checkpoint_format" if older else "format"
        layout = setting("gptq", config, key, ("gptq", "gptq_v2"), "gptq")
        first_zero = 1 if layout == "gptq" else 0
        inputs = group_size("gptq", config, default=GROUP)
        return cls(bits, inputs, by_activation, first_zero, symmetric)


class Rules:
    """The settings with the form of each layer.

    Args:
        config: the checkpoint's settings. ``dynamic`` has regular expressions for names of layers:
            the first match decides. An expression with ``-:`` at the start leaves the layer plain;
            another has settings for the layer. ``modules_in_block_to_quantize`` lists names within
            a block, often in several lists.

    Raises:
        QuantizationError: a setting cannot be read.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.form = WeightForm.of(config)
        self._forms: list[tuple[re.Pattern[str], WeightForm | None]] = []
        for pattern, settings in _dynamic(config).items():
            form = _dynamic_form(config, pattern, settings)
            self._forms.append((_expression(pattern), form))
        listed = config.get("modules_in_block_to_quantize") or []
        self._listed = list(_names_in(listed))

    def form_of(self, name: str) -> WeightForm | None:
        """Return the form of a layer, ``None`` if the layer is plain."""
        for expression, form in self._forms:
            if expression.match(name):
                return form
        # Dots at both ends keep "q_proj" from matching "qq_proj".
        within = f".{name}."
        if self._listed and not any(f".{part}." in within for part in self._listed):
            return None
        return self.form


def _dynamic(config: Mapping[str, Any]) -> Mapping[str, Any]:
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise QuantizationError(
            f"the checkpoint's quantization gptq has dynamic {dynamic!r:.80}, expected regular "
            "expressions with settings: correct it in the checkpoint's config"
        )
    return dynamic


def _expression(pattern: str) -> re.Pattern[str]:
    """Compile the pattern of ``dynamic`` without the sign.

    Raises:
        QuantizationError: the pattern is no regular expression.
    """
    try:
        return re.compile(pattern.removeprefix("-:").removeprefix("+:"))
    except re.error as error:
        raise QuantizationError(
            f"the checkpoint's quantization gptq has dynamic {pattern!r:.80}, which is no regular "
            f"expression ({error}): correct it in the checkpoint's config"
        ) from error


def _dynamic_form(config: Mapping[str, Any], pattern: str, settings: object) -> WeightForm | None:
    """Return the form from a pattern of ``dynamic``; ``None`` for a plain layer."""
    if pattern.startswith("-:"):
        return None
    others = settings if isinstance(settings, Mapping) else {}
    return WeightForm.of({**config, **others})


def _names_in(listed: object) -> Iterator[str]:
    """Yield the names in nested lists.

    Raises:
        QuantizationError: there is another value in the lists.
    """
    if isinstance(listed, str):
        yield listed
    elif isinstance(listed, (list, tuple)):
        for one in listed:
            yield from _names_in(one)
    else:
        raise QuantizationError(
            f"the checkpoint's quantization gptq has {listed!r:.80} in "
            "modules_in_block_to_quantize, expected names of layers: correct it in the "
            "checkpoint's config"
        )


@PluggableClass.register("gptq")
class GPTQConfig(CheckpointConfig):
    """Weights of 4 or 8 bits with a scale and a zero for each group of inputs.

    Args:
        rules: decide the form of each layer.
        ignore: patterns of plain layers in the checkpoint.
        head: True if the settings quantize the head.
    """

    def __init__(self, rules: Rules, ignore: Sequence[str] = (), *, head: bool = False) -> None:
        super().__init__(ignore, head=head)
        self.rules = rules

    def get_name(self) -> str:
        return "gptq"

    @staticmethod
    def get_config_filenames() -> list[str]:
        return ["quantize_config.json"]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> QuantizationConfig:
        """Make the config from a checkpoint's settings, see ``WeightForm`` and ``Rules``.

        Raises:
            QuantizationError: a setting cannot be read.
        """
        expect_settings("gptq", config)
        ignore = not_converted("gptq", config)
        head = head_is_quantized("gptq", config)
        return cls(Rules(config), ignore, head=head)

    def is_plain(self, prefix: str) -> bool:
        return super().is_plain(prefix) or self._form(prefix) is None

    def linear_method(self, prefix: str) -> QuantizeMethodBase:
        # If the tensors of a plain layer are quantized, they are so in the usual form.
        method: QuantizeMethodBase = GPTQLinearMethod(self._form(prefix) or self.rules.form)
        return method

    def _form(self, prefix: str) -> WeightForm | None:
        """Return the form of a layer; ``None`` for a plain layer.

        Raises:
            QuantizationError: the layers inside a merged layer have different forms.
        """
        forms = {name: self.rules.form_of(name) for name in self.checkpoint_names(prefix)}
        first, *others = forms.values()
        if any(form != first for form in others):
            raise QuantizationError(
                f"the checkpoint's quantization gptq gives {', '.join(forms)} different settings "
                "(dynamic or modules_in_block_to_quantize), but they are one layer here, "
                f"{prefix}: take a checkpoint that quantizes all of them alike"
            )
        return first


@PluggableClass.register("gptq_linear_method")
class GPTQLinearMethod(GroupLinearMethod):
    """Holds ``weight``, ``scales`` and ``offsets`` for ``quantized_linear``, and ``input_order``.

    A checkpoint has ``qweight`` ``[in_features · bits / 32, out_features]``, ``qzeros`` ``[groups,
    out_features · bits / 32]``, ``scales`` ``[groups, out_features]`` and ``g_idx``
    ``[in_features]``, the group of each input. ``input_order`` is ``None`` for inputs in their own
    order.

    Args:
        form: the form of the quantized weight.
    """

    def __init__(self, form: WeightForm) -> None:
        self.form = form
        self.bits = form.bits
        self.group_size = form.group_size

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
        inputs = input_size_per_partition
        has_groups = self.group_size != -1
        # The groups of this rank's inputs may be any groups of the layer.
        if self.form.by_activation and has_groups and inputs != input_size:
            raise _scattered(layer)
        groups = expect_groups(layer, inputs, self.group_size)
        rows = sum(output_partition_sizes)
        in_word = 32 // self.bits
        expect_words(layer, output_partition_sizes, in_word, "outputs")
        expect_words(layer, [inputs], in_word, "inputs")
        words = {"packed_factor": in_word, "output_dim": 1, **extra_weight_attrs}
        cut = cut_of_groups(self.group_size)
        shape = (inputs // in_word, rows)
        create_parameter(layer, "qweight", shape, torch.int32, input_dim=0, packed_dim=0, **words)
        create_parameter(
            layer, "qzeros", (groups, rows // in_word), torch.int32, packed_dim=1, **cut, **words
        )
        create_group_scales(layer, groups, rows, self.group_size, **extra_weight_attrs)
        _create_index(layer, len(output_partition_sizes), inputs, extra_weight_attrs)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Repack the weight with the inputs of each group side by side.

        Raises:
            QuantizationError: the zeros contradict the settings, or this rank cannot keep the
                groups of inputs.
        """
        numbers = unpack_words(layer.qweight.data, 0, self.bits).T
        zeros = self._zeros(layer)
        order = self._order(layer, layer.g_idx.data)
        if order is not None:
            numbers = numbers[:, order]
        codes = codes_of(numbers, zeros, layer.scales.data.T, self.bits)
        replace(layer, ["qweight", "qzeros", "g_idx"], {**stored([codes]), "input_order": order})

    def _zeros(self, layer: Any) -> Tensor | None:
        """Return the zeros ``[out_features, groups]``; ``None`` if all are ``2 ** (bits - 1)``.

        Some tools store 7 for symmetric zeros of four bits, and others store 8. If the checkpoint
        has ``sym``, the stored number does not count. A checkpoint without the setting is symmetric
        if all stored zeros are one of these two numbers, or in the format ``gptq_v2`` if all are 8.

        Raises:
            QuantizationError: the checkpoint claims symmetry, and stores different zeros.
        """
        words = layer.qzeros.data
        numbers = unpack_words(words, 1, self.bits)
        # Tools store any zero for a group without a weight.
        used = numbers[layer.scales.data != 0]
        are_equal = used.numel() == 0 or bool((used == used[0]).all())
        middle = 1 << self.bits - 1
        if self.form.symmetric and not are_equal:
            raise QuantizationError(
                f"{layer.prefix} has different zeros in the checkpoint, whose quantization gptq "
                f"says that all are {middle} (sym is true): set sym to false in the checkpoint's "
                "config if the zeros are right"
            )
        if self.form.symmetric:
            return None
        if self.form.symmetric is None and are_equal:
            # In the second format, the stored number is the zero.
            usual = ([middle],) if self.form.first_zero == 0 else ([middle - 1], [middle])
            # An empty list if no group has a weight.
            if used[:1].tolist() in usual:
                return None
        if self.form.first_zero == 0:
            return numbers.T
        # The writer has taken 1 from each zero by one subtraction from the word, which borrows
        # for a zero of 0.
        ones = 0x11111111 if self.bits == 4 else 0x01010101
        return unpack_words(words + ones, 1, self.bits).T

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if layer.input_order is not None:
            x = x.index_select(-1, layer.input_order)
        return super().apply(layer, x, bias)

    def _order(self, layer: Any, groups: Tensor) -> Tensor | None:
        """Return the inputs in the order of groups; ``None`` if the order is unchanged.

        Args:
            layer: the layer, for messages.
            groups: the group of each input, for each layer inside a merged layer.

        Raises:
            QuantizationError: the layers inside have different orders, or the groups of this rank's
                inputs have different sizes.
        """
        if self.group_size == -1:
            return None
        lists = groups.reshape(-1, groups.shape[-1])
        first: Tensor = lists[0]
        others: list[Tensor] = list(lists[1:])
        if not all(torch.equal(each, first) for each in others):
            raise QuantizationError(
                f"{layer.prefix} stands for layers of the checkpoint whose inputs are in groups in "
                "different orders (desc_act), and holds one order: take a checkpoint without "
                "desc_act"
            )
        # A rank's first group may have any number.
        index = first.long() - first.min().long()
        expected = torch.arange(len(index), device=index.device) // self.group_size
        if torch.equal(index, expected):
            return None
        order = index.argsort(stable=True)
        is_part = layer.input_size_per_partition != layer.input_size
        if is_part or not torch.equal(index[order], expected):
            raise _scattered(layer)
        return order


def _scattered(layer: Any) -> QuantizationError:
    return QuantizationError(
        f"{layer.prefix or type(layer).__name__} has inputs in groups in the order of their "
        "activations (desc_act), which are scattered over the ranks that share the inputs, or not "
        "of one size: take one rank, or a checkpoint without desc_act"
    )


def _create_index(layer: Any, parts: int, inputs: int, attributes: Mapping[str, Any]) -> None:
    """Give a layer the list of the group of each input."""
    if parts == 1:
        create_parameter(layer, "g_idx", (inputs,), torch.int32, input_dim=0, **attributes)
        return
    # Each layer inside a merged layer has a list.
    create_parameter(
        layer,
        "g_idx",
        (parts, inputs),
        torch.int32,
        needs_scalar_to_array=True,
        **attributes,
    )
