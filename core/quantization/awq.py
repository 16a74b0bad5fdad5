"""Checkpoints of AWQ (Lin et al., arXiv:2306.00978), in the layout of its ``gemm`` kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from opgraft.binding.pluggable_class import PluggableClass
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
    parts_not_converted,
    replace,
    setting,
    unpack_words,
)
from opgraft.quantization.codes import stored
from torch import Tensor

BITS = 4
GROUP = 128
"""Inputs of a group if the checkpoint does not say."""
IN_WORD = 32 // BITS
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place of eight outputs in a word. From the lowest bits: 0, 2, 4, 6, 1, 3, 5, 7."""


@PluggableClass.register("awq")
class AWQConfig(CheckpointConfig):
    """Weights of 4 bits with a scale and a zero for each group of inputs.

    Args:
        group_size: inputs of a group, -1 for all.
        ignore: patterns of plain layers in the checkpoint.
        head: True if the settings quantize the head.
    """

    def __init__(self, group_size: int, ignore: Sequence[str] = (), *, head: bool = False) -> None:
        super().__init__(ignore, head=head)
        self.group_size = group_size

    def get_name(self) -> str:
        return "awq"

    @staticmethod
    def get_config_filenames() -> list[str]:
        return ["quant_config.json"]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> QuantizationConfig:
        """Make the config from the checkpoint's settings.

        These are ``bits``, ``group_size``, the layout and the list of plain layers.

        The layout is ``version``, or ``format`` in newer checkpoints.

        Raises:
            QuantizationError: a setting cannot be read.
        """
        expect_settings("awq", config)
        # quant_config.json has older names.
        bits = "bits" if config.get("bits") is not None else "w_bit"
        size = "group_size" if config.get("group_size") is not None else "q_group_size"
        layout = "version" if config.get("version") is not None else "format"
        setting("awq", config, bits, (BITS,), BITS)
        setting("awq", config, "zero_point", (True,), True)
        setting("awq", config, layout, ("gemm",), "gemm")
        # llm-awq packs words in another order.
        if str(config.get("backend")).lower() == "llm-awq":
            setting("awq", config, "backend", ("auto", "autoawq"))

        inputs = group_size("awq", config, size, GROUP)
        ignore = parts_not_converted("awq", config)
        return cls(inputs, ignore, head=head_is_quantized("awq", config))

    def linear_method(self, prefix: str) -> QuantizeMethodBase:
        method: QuantizeMethodBase = AWQLinearMethod(self.group_size)
        return method


@PluggableClass.register("awq_linear_method")
class AWQLinearMethod(GroupLinearMethod):
    """Holds ``weight``, ``scales`` and ``offsets`` for ``quantized_linear``.

    A checkpoint has ``qweight`` ``[in_features, out_features / 8]`` and ``qzeros`` ``[groups,
    out_features / 8]`` in ``int32``, and ``scales`` ``[groups, out_features]``.
    """

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size

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
        expect_words(layer, output_partition_sizes, IN_WORD, "outputs")
        rows = sum(output_partition_sizes)
        words_of_row = rows // IN_WORD
        words = {"output_dim": 1, "packed_dim": 1, "packed_factor": IN_WORD, **extra_weight_attrs}
        cut = cut_of_groups(self.group_size)
        shape = (input_size_per_partition, words_of_row)
        create_parameter(layer, "qweight", shape, torch.int32, input_dim=0, **words)
        create_parameter(layer, "qzeros", (groups, words_of_row), torch.int32, **cut, **words)
        create_group_scales(layer, groups, rows, self.group_size, **extra_weight_attrs)

    def process_weights_after_loading(self, layer: Any) -> None:
        numbers = _unpacked(layer.qweight.data)
        zeros = _unpacked(layer.qzeros.data)
        codes = codes_of(numbers.T, zeros.T, layer.scales.data.T, BITS)
        replace(layer, ["qweight", "qzeros"], stored([codes]))


def _unpacked(words: Tensor) -> Tensor:
    """Return the numbers ``[rows, outputs]`` of words ``[rows, outputs / 8]``, in order."""
    numbers = unpack_words(words, 1, BITS)
    by_word = numbers.reshape(len(numbers), -1, IN_WORD)
    return by_word[..., PLACES].flatten(1)
