"""Common ground of quantized checkpoints: settings, parameters, and packed words."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from opgraft.errors import QuantizationError
from opgraft.ops.embedding import ParallelLMHead
from opgraft.ops.linear.methods import LinearMethodBase, QuantizeMethodBase
from opgraft.ops.linear.parallel import LinearBase
from opgraft.ops.linear.quantization_config import QuantizationConfig
from opgraft.ops.linear.quantized import functional
from opgraft.ops.moe.fused import FusedMoE
from opgraft.ops.moe.fused.methods import FusedMoEMethodBase
from opgraft.ops.moe.quantized.methods import ExpertWeights, QuantizedFusedMoEMethod
from opgraft.ops.weights import set_weight_attrs
from opgraft.quantization.codes import Codes
from opgraft.quantization.experts import CheckpointExperts, expert_path
from opgraft.quantization.online import put
from opgraft.quantization.patterns import Patterns, names_of
from torch import Tensor, nn


class CheckpointConfig(QuantizationConfig):
    """A quantization with settings and weights in a checkpoint.

    The tensors of the checkpoint decide if a layer is quantized. The settings decide for a layer
    without tensors, as in a folder with a config and no weights.

    Args:
        ignore: patterns of plain layers in the checkpoint.
        head: True if the settings quantize the head.

    Attributes:
        stored: name of a layer in the checkpoint, as in the model → True if the weight is
            quantized. Empty if no weights are read.
    """

    def __init__(self, ignore: Sequence[str] = (), *, head: bool = False) -> None:
        super().__init__()
        self.ignore = Patterns(ignore)
        self.head = head
        self.stored: Mapping[str, bool] = {}

    @abstractmethod
    def linear_method(self, prefix: str) -> QuantizeMethodBase | None:
        """Make the weight method of a linear layer; ``None`` for a plain layer."""

    def is_plain(self, prefix: str) -> bool:
        """Return True if the settings leave the linear layer ``prefix`` plain."""
        return self.ignore.match(prefix, self.packed_modules_mapping)

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    def expert_weights(self, layer: FusedMoE) -> ExpertWeights | None:
        """Return the format of a layer of experts; ``None`` for a plain layer.

        Raises:
            QuantizationError: the checkpoint quantizes some experts of the layer, and not all.
        """
        plain = []
        quantized = []
        for expert in range(layer.num_experts):
            for projection in ("gate_up_proj", "down_proj"):
                name = f"{expert_path(layer, expert)}.{projection}"
                if self._of_linear(name) is None:
                    plain.append(name)
                else:
                    quantized.append(name)
        if plain and quantized:
            raise QuantizationError(
                f"{plain[0]} is plain in the checkpoint, and {quantized[0]} is quantized, but the "
                "experts of a layer are kept as one: take a checkpoint that has all or none of a "
                "layer's experts among those that it does not quantize"
            )
        return None if plain else CheckpointExperts(self)

    def get_quant_method(
        self, layer: nn.Module, prefix: str
    ) -> QuantizeMethodBase | FusedMoEMethodBase | None:
        if isinstance(layer, FusedMoE):
            weights = self.expert_weights(layer)
            return None if weights is None else QuantizedFusedMoEMethod(layer.moe_config, weights)
        if isinstance(layer, LinearBase):
            return self._of_linear(prefix)
        if isinstance(layer, ParallelLMHead):
            return self._of_head(prefix)
        return None

    def _of_linear(self, prefix: str) -> QuantizeMethodBase | None:
        # Tensors count more than settings, which may be wrong.
        is_quantized = self._is_quantized_in_checkpoint(prefix)
        if is_quantized is None:
            is_quantized = not self.is_plain(prefix)
        return self.linear_method(prefix) if is_quantized else None

    def _of_head(self, prefix: str) -> QuantizeMethodBase | None:
        is_quantized = self._is_quantized_in_checkpoint(prefix)
        if is_quantized is None:
            is_quantized = self.head
        return self.linear_method(prefix) if is_quantized else None

    def _is_quantized_in_checkpoint(self, prefix: str) -> bool | None:
        """Return True if the checkpoint quantizes a layer; ``None`` without such a layer.

        Raises:
            QuantizationError: some layers inside a merged layer are quantized, and not all.
        """
        known = [name for name in self.checkpoint_names(prefix) if name in self.stored]
        quantized = [name for name in known if self.stored[name]]
        plain = [name for name in known if not self.stored[name]]
        if quantized and plain:
            raise QuantizationError(
                f"{', '.join(plain)} is plain in the checkpoint and {', '.join(quantized)} is "
                f"quantized, but they are one layer here, {prefix}: take a checkpoint that "
                "quantizes all of them or none"
            )
        return bool(quantized) if known else None

    def checkpoint_names(self, prefix: str) -> Sequence[str]:
        """Return the names of a layer in a checkpoint: several if the layer is merged."""
        if prefix in self.stored:
            return [prefix]
        parts = names_of(prefix, self.packed_modules_mapping)
        # Experts have names that models do not list.
        candidates = [*parts, *names_of(prefix, FusedMoE.packed_modules_mapping)]
        known = [name for name in dict.fromkeys(candidates) if name in self.stored]
        return known or parts or [prefix]


class GroupLinearMethod(LinearMethodBase):
    """A weight method from tensors of a checkpoint to storage of ``quantized_linear``."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.quantized_linear(x, layer.weight, layer.scales, layer.offsets, bias)


def expect_settings(name: str, config: Mapping[str, Any]) -> None:
    """Raise ``QuantizationError`` for a checkpoint without settings of the quantization."""
    if not config:
        raise QuantizationError(
            f"the quantization {name} is read from checkpoints that have it, and this one has not: "
            "take one that has, or a quantization that is made while loading, such as 'int8', "
            "'int4' or 'fp8'"
        )


def setting(
    name: str, config: Mapping[str, Any], key: str, choices: Sequence[Any], default: Any = None
) -> Any:
    """Return a setting of a checkpoint, in small letters. Null counts as missing.

    A number may be written in another way, such as 4.0 for 4.

    Raises:
        QuantizationError: the value is none of the choices.
    """
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, str):
        value = value.lower()
    if value not in choices:
        named = ", ".join(map(repr, choices))
        raise QuantizationError(
            f"the checkpoint's quantization {name} has {key} {value!r:.80}, and "
            f"{named} can be read: take a checkpoint in another quantization"
        )
    # The choice itself: 4.0 equals 4, and is no size of a tensor.
    known = list(choices)
    place = known.index(value)
    return known[place]


def group_size(
    name: str, config: Mapping[str, Any], key: str = "group_size", default: int | None = None
) -> int:
    """Return the number of inputs with a common scale, -1 for all.

    Raises:
        QuantizationError: the value is no such number.
    """
    value = config.get(key)
    if value is None:
        value = default
    if type(value) is not int or (value < 1 and value != -1):
        raise QuantizationError(
            f"the checkpoint's quantization {name} has {key} {value!r:.80}, expected a number of "
            "inputs, or -1 for all"
        )
    return value


def name_list(name: str, config: Mapping[str, Any], key: str) -> list[str]:
    """Return a list of names of layers; an empty list if the checkpoint has none.

    Raises:
        QuantizationError: the value is no list of strings.
    """
    value = config.get(key) or []
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in value):
        raise QuantizationError(
            f"the checkpoint's quantization {name} has {key} {value!r:.80}, expected a list of "
            "names of layers: correct it in the checkpoint's config"
        )
    return list(value)


def not_converted(
    name: str, config: Mapping[str, Any], key: str = "modules_to_not_convert"
) -> list[str]:
    """Return patterns for plain modules.

    As in transformers, a name of the list also stands for modules further inside: ``"lm_head"``
    gives the patterns ``"lm_head"`` and ``"*.lm_head"``.

    Raises:
        QuantizationError: the value is no list of strings.
    """
    patterns = []
    for module in name_list(name, config, key):
        patterns += [module, f"*.{module}"]
    return patterns


def parts_not_converted(name: str, config: Mapping[str, Any]) -> list[str]:
    """Return patterns for names with an entry of ``modules_to_not_convert`` inside.

    AutoAWQ leaves a layer plain if any part of the name is an entry, such as ``"self_attn."``.

    Raises:
        QuantizationError: the entries are no list of strings.
    """
    entries = name_list(name, config, "modules_to_not_convert")
    # An empty entry would match every layer.
    return [f"re:.*{re.escape(entry)}" for entry in entries if entry]


def head_is_quantized(name: str, config: Mapping[str, Any]) -> bool:
    """Return True if ``lm_head`` of the settings quantizes the head.

    Raises:
        QuantizationError: ``lm_head`` is neither true nor false.
    """
    return bool(setting(name, config, "lm_head", (False, True), False))


def create_parameter(
    layer: nn.Module, name: str, shape: Sequence[int], dtype: torch.dtype, **attributes: Any
) -> None:
    """Give ``layer`` an empty parameter, in the form of a checkpoint."""
    parameter = nn.Parameter(torch.empty(tuple(shape), dtype=dtype), requires_grad=False)
    set_weight_attrs(parameter, attributes)
    layer.register_parameter(name, parameter)


def create_group_scales(
    layer: nn.Module, groups: int, outputs: int, group_size: int, **attributes: Any
) -> None:
    """Give ``layer`` the parameter ``scales`` ``[groups, outputs]``."""
    create_parameter(
        layer,
        "scales",
        (groups, outputs),
        torch.float32,
        output_dim=1,
        **cut_of_groups(group_size),
        **attributes,
    )


def cut_of_groups(group_size: int) -> dict[str, int]:
    """Return the attributes of a parameter with a row for each group of inputs."""
    # One group of all inputs is the same on every rank.
    return {} if group_size == -1 else {"input_dim": 0, "input_unit": group_size}


def replace(layer: nn.Module, gone: Sequence[str], tensors: Mapping[str, Tensor | None]) -> None:
    """Let ``layer`` hold ``tensors`` in place of the ``gone`` parameters."""
    for name in gone:
        del layer._parameters[name]
    put(layer, tensors)


def expect_groups(layer: Any, inputs: int, size: int) -> int:
    """Return the number of groups of a rank.

    Raises:
        QuantizationError: groups of this size do not divide the inputs.
    """
    if size == -1:
        return 1
    if inputs % size:
        raise QuantizationError(
            f"{layer.prefix or type(layer).__name__} has {inputs} inputs on this rank, which the "
            f"checkpoint's groups of {size} do not divide: take fewer ranks"
        )
    return inputs // size


def expect_words(layer: Any, sizes: Sequence[int], count: int, what: str) -> None:
    """Raise ``QuantizationError`` if a part does not fill words of ``count`` numbers."""
    if any(size % count for size in sizes):
        raise QuantizationError(
            f"{layer.prefix or type(layer).__name__} has {' + '.join(map(str, sizes))} {what} on "
            f"this rank, and the checkpoint packs {count} of them into a word: take fewer ranks"
        )


def unpack_words(words: Tensor, dim: int, bits: int) -> Tensor:
    """Return the numbers in words of 32 bits, the first in the lowest bits, in ``uint8``.

    Args:
        words: in ``int32``.
        dim: the dimension of the packed numbers.
        bits: 4 or 8.
    """
    numbers = words.movedim(dim, -1).contiguous().view(torch.uint8)
    if bits == 4:
        halves = torch.stack((numbers & 15, numbers >> 4), -1)
        numbers = halves.flatten(-2)
    return numbers.movedim(-1, dim)


def codes_of(numbers: Tensor, zeros: Tensor | None, scales: Tensor, bits: int) -> Codes:
    """Return ``(number - zero) · scale`` as codes.

    Args:
        numbers: ``[rows, in_features]`` in ``uint8``.
        zeros: ``[rows, groups]`` in an integer dtype; ``None`` for the middle, ``2 ** (bits - 1)``.
        scales: ``[rows, groups]`` in float32.
        bits: 4 or 8.
    """
    middle = 1 << bits - 1
    codes = numbers
    first = 0
    if bits == 8:
        # Flipping the highest bit subtracts the middle.
        codes = (numbers ^ middle).view(torch.int8)
        first = middle
    if zeros is None or bool((zeros == middle).all()):
        return Codes(codes, scales)
    return Codes(codes, scales, (first - zeros.float()) * scales)


@dataclass(frozen=True)
class Scales:
    """The scales of a weight, in the form of a checkpoint.

    Attributes:
        block: outputs and inputs with a common scale, -1 for all; ``None`` for one scale of each
            layer inside a merged layer.
    """

    block: tuple[int, int] | None

    def create(
        self, layer: Any, name: str, inputs: int, outputs: Sequence[int], **attributes: Any
    ) -> None:
        """Give ``layer`` the parameter.

        Raises:
            QuantizationError: a rank's part of the weight cuts blocks.
        """
        if self.block is None:
            shape: tuple[int, ...] = (len(outputs),)
            create_parameter(
                layer, name, shape, torch.float32, needs_scalar_to_array=True, **attributes
            )
            return
        height, width = self.block
        # The last block of a whole layer may be smaller than the others.
        if inputs == layer.input_size and width != -1:
            groups = -(-inputs // width)
        else:
            groups = expect_groups(layer, inputs, width)
        _expect_whole_blocks(layer, outputs, height)
        if width != -1:
            attributes = {"input_dim": 1, "input_unit": width, **attributes}
        shape = (-(-sum(outputs) // height), groups)
        create_parameter(
            layer, name, shape, torch.float32, output_dim=0, output_unit=height, **attributes
        )

    def by_output(self, scales: Tensor, outputs: Sequence[int]) -> Tensor:
        """Return ``[outputs, groups]`` if no block has several outputs, else unchanged scales."""
        if self.block is not None:
            return scales
        times = torch.tensor(list(outputs), device=scales.device)
        return scales.repeat_interleave(times)[:, None]


def _expect_whole_blocks(layer: Any, outputs: Sequence[int], height: int) -> None:
    """Check that a rank's part of a weight cuts no blocks.

    Raises:
        QuantizationError: the part cuts blocks.
    """
    *inner, last = outputs
    # The last block of the whole layer may be smaller.
    has_rest = sum(outputs) == layer.output_size
    cuts_inner = any(size % height for size in inner)
    cuts_last = last % height and not has_rest
    if not cuts_inner and not cuts_last:
        return
    name = layer.prefix or type(layer).__name__
    sizes = " + ".join(map(str, outputs))
    raise QuantizationError(
        f"{name} has {sizes} outputs on this rank, which the checkpoint's blocks of {height} do "
        "not divide: take fewer ranks"
    )
