"""Checkpoints that GPTQ made (Frantar et al., arXiv:2210.17323), as AutoGPTQ and GPTQModel write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    create_parameter,
    expect_groups,
    expect_settings,
    expect_words,
    group_size,
    not_converted,
    replace,
    setting,
    unpack_words,
)
from opgraft.quantization.codes import stored
from torch import Tensor


@PluggableClass.register("gptq")
class GPTQConfig(CheckpointConfig):
    """Weights of 4 or 8 bits with a scale and a zero for each group of inputs.

    Args:
        bits: of a weight.
        group_size: inputs of a group, -1 for all.
        by_activation: inputs are in groups in the order of their activations (``desc_act``), not in their own.
        first_zero: what a stored zero of 0 stands for: 1 in the first format, 0 in ``gptq_v2``.
        ignore: patterns of layers that are plain in the checkpoint.
    """

    def __init__(
        self,
        bits: int,
        group_size: int,
        by_activation: bool = False,
        first_zero: int = 1,
        ignore: Sequence[str] = (),
    ) -> None:
        super().__init__(ignore)
        self.bits, self.group_size = bits, group_size
        self.by_activation, self.first_zero = by_activation, first_zero

    def get_name(self) -> str:
        return "gptq"

    @staticmethod
    def get_config_filenames() -> list[str]:
        return ["quantize_config.json"]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> QuantizationConfig:
        """Make it of a checkpoint's ``bits``, ``group_size``, ``desc_act`` and ``checkpoint_format``.

        Raises:
            QuantizationError: a setting cannot be read.
        """
        expect_settings("gptq", config)
        setting("gptq", config, "dynamic", (None, {}))
        bits = setting("gptq", config, "bits", (4, 8))
        by_activation = setting("gptq", config, "desc_act", (False, True), False)
        first = setting("gptq", config, "checkpoint_format", ("gptq", "gptq_v2"), "gptq") == "gptq"
        ignore = not_converted("gptq", config)
        return cls(bits, group_size("gptq", config), by_activation, int(first), ignore)

    def linear_method(self, prefix: str) -> QuantizeMethodBase:
        method: QuantizeMethodBase = GPTQLinearMethod(
            self.bits, self.group_size, self.by_activation, self.first_zero
        )
        return method


@PluggableClass.register("gptq_linear_method")
class GPTQLinearMethod(GroupLinearMethod):
    """Holds ``weight``, ``scales`` and ``offsets`` as ``quantized_linear`` takes them, and the order of the inputs.

    A checkpoint has ``qweight`` ``[in_features · bits / 32, out_features]``, ``qzeros``
    ``[groups, out_features · bits / 32]``, ``scales`` ``[groups, out_features]`` and ``g_idx`` ``[in_features]``, the
    group of each input. ``input_order`` is ``None`` where inputs are in groups in their own order.
    """

    def __init__(self, bits: int, group_size: int, by_activation: bool, first_zero: int) -> None:
        self.bits, self.group_size = bits, group_size
        self.by_activation, self.first_zero = by_activation, first_zero

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
        if self.by_activation and self.group_size != -1 and input_size_per_partition != input_size:
            raise _scattered(layer)
        groups = expect_groups(layer, input_size_per_partition, self.group_size)
        inputs, parts, rows = (
            input_size_per_partition,
            len(output_partition_sizes),
            sum(output_partition_sizes),
        )
        in_word = 32 // self.bits
        expect_words(layer, output_partition_sizes, in_word, "outputs")
        expect_words(layer, [inputs], in_word, "inputs")
        words = {"packed_factor": in_word, "output_dim": 1, **extra_weight_attrs}
        cut = {} if self.group_size == -1 else {"input_dim": 0, "input_unit": self.group_size}
        shape = (inputs // in_word, rows)
        create_parameter(layer, "qweight", shape, torch.int32, input_dim=0, packed_dim=0, **words)
        create_parameter(
            layer, "qzeros", (groups, rows // in_word), torch.int32, packed_dim=1, **cut, **words
        )
        create_parameter(
            layer,
            "scales",
            (groups, rows),
            torch.float32,
            output_dim=1,
            **cut,
            **extra_weight_attrs,
        )
        one = {"input_dim": 0} if parts == 1 else {"needs_scalar_to_array": True}
        lists = (inputs,) if parts == 1 else (parts, inputs)
        create_parameter(layer, "g_idx", lists, torch.int32, **one, **extra_weight_attrs)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Repack the weight, inputs of a group beside one another.

        Raises:
            QuantizationError: the groups of inputs cannot be kept so.
        """
        numbers = unpack_words(layer.qweight.data, 0, self.bits).T
        zeros = unpack_words(layer.qzeros.data, 1, self.bits).T.to(torch.int16) + self.first_zero
        order = self._order(layer, layer.g_idx.data)
        numbers = numbers if order is None else numbers[:, order]
        codes = codes_of(numbers, zeros, layer.scales.data.T, self.bits)
        replace(layer, ["qweight", "qzeros", "g_idx"], {**stored([codes]), "input_order": order})

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        ordered = x if layer.input_order is None else x.index_select(-1, layer.input_order)
        return super().apply(layer, ordered, bias)

    def _order(self, layer: Any, groups: Tensor) -> Tensor | None:
        """Return the inputs in the order of their groups, ``None`` where that is their own."""
        if self.group_size == -1:
            return None
        several = groups.reshape(-1, groups.shape[-1])
        if not bool((several == several[0]).all()):
            raise QuantizationError(
                f"{layer.prefix} stands for layers of the checkpoint whose inputs are in groups in different orders "
                "(desc_act), and holds one order: take a checkpoint without desc_act"
            )
        index = several[0].long() - several[0].min().long()
        expected = torch.arange(len(index), device=index.device) // self.group_size
        if torch.equal(index, expected):
            return None
        order = index.argsort(stable=True)
        if layer.input_size_per_partition != layer.input_size or not torch.equal(
            index[order], expected
        ):
            raise _scattered(layer)
        return order


def _scattered(layer: Any) -> QuantizationError:
    return QuantizationError(
        f"{layer.prefix or type(layer).__name__} has inputs in groups in the order of their activations (desc_act), "
        "which are scattered over the ranks that share the inputs, or not of one size: take one rank, or a checkpoint "
        "without desc_act"
    )
