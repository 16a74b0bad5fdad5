"""Blocks of GGUF files, kept unchanged: a layer holds the codes of the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from opgraft.binding.functional import Functional
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.errors import QuantizationError
from opgraft.ops.embedding.vocab import VocabParallelEmbedding
from opgraft.ops.linear.methods import LinearMethodBase, QuantizeMethodBase
from opgraft.ops.linear.parallel import LinearBase
from opgraft.ops.linear.quantization_config import QuantizationConfig
from opgraft.ops.linear.quantized import functional
from opgraft.ops.weights import LoadedTensor, set_weight_attrs
from opgraft.quantization.codes import Codes, stored
from opgraft.quantization.gguf_blocks import FORMATS
from opgraft.quantization.online import LooksUpCodes, put
from opgraft.quantization.patterns import names_of
from torch import Tensor, nn


@runtime_checkable
class BlockTensor(LoadedTensor, Protocol):
    """A tensor in blocks of a file."""

    @property
    def quantization(self) -> str | None:
        """The type of the blocks; ``None`` where there are none."""

    def blocks(self) -> Any:
        """Return the same rows as bytes."""


@PluggableClass.register("gguf")
class GGUFConfig(QuantizationConfig):
    """Linear layers and embeddings hold the blocks of a GGUF file; blocks of other types are read
    as numbers, and so are blocks of an embedding with padded rows.

    Args:
        types: the type of blocks by the name of each tensor.
    """

    def __init__(self, types: Mapping[str, str]) -> None:
        super().__init__()
        self.types = types

    def get_name(self) -> str:
        return "gguf"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> QuantizationConfig:
        """Make the config from the types of a file.

        Raises:
            QuantizationError: the checkpoint is no GGUF file.
        """
        if "types" not in config:
            raise QuantizationError(
                "the quantization gguf keeps the blocks of a GGUF file, and this checkpoint is "
                "none: take a GGUF file, or a quantization that is made while loading, such as "
                "'int4'"
            )
        return cls(config["types"])

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if not isinstance(layer, LinearBase) and not (
            isinstance(layer, VocabParallelEmbedding) and layer.is_unpadded
        ):
            return None

        names = [prefix, *names_of(prefix, self.packed_modules_mapping)]
        kinds = {
            self.types.get(f"{name}.weight") for name in names if f"{name}.weight" in self.types
        }
        if not kinds or not kinds <= set(FORMATS):
            return None

        method: QuantizeMethodBase = GGUFLinearMethod(sorted(map(str, kinds)))
        return method


@PluggableClass.register("gguf_linear_method")
class GGUFLinearMethod(LooksUpCodes, LinearMethodBase):
    """Holds ``weight``, ``scales`` and ``offsets`` for ``quantized_linear``, with the numbers of
    the file.

    Args:
        kinds: the types of the blocks, for each layer inside a merged layer.
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        self.kinds = kinds

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
        """Make a ``weight`` without memory; codes take its place after loading.

        Raises:
            QuantizationError: a rank's inputs cut blocks.
        """
        for kind in self.kinds:
            if input_size_per_partition % FORMATS[kind].values:
                raise QuantizationError(
                    f"{layer.prefix or type(layer).__name__} has {input_size_per_partition} inputs "
                    f"on this rank, which blocks of {FORMATS[kind].values}, as {kind} has them, do "
                    "not divide: take fewer ranks, or put the layer on the list "
                    "quantization.skip, which reads its blocks as numbers"
                )

        shape = (sum(output_partition_sizes), input_size_per_partition)
        weight = nn.Parameter(
            torch.empty(shape, dtype=params_dtype, device="meta"), requires_grad=False
        )
        loading = _Loading(
            layer, extra_weight_attrs.pop("weight_loader"), torch.get_default_device()
        )
        set_weight_attrs(
            weight,
            {"input_dim": 1, "output_dim": 0, "weight_loader": loading, **extra_weight_attrs},
        )
        layer.register_parameter("weight", weight)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.quantized_linear(x, layer.weight, layer.scales, layer.offsets, bias)

    def form_of(self, layer: Any) -> tuple[Functional[..., Tensor], tuple[Tensor | None, ...]]:
        return functional.quantized_linear, (layer.weight, layer.scales, layer.offsets)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check for a complete weight.

        Raises:
            QuantizationError: parts of the weight are missing.
        """
        if layer.weight.is_meta:
            raise QuantizationError(f"{layer.prefix}: its weight was not loaded, or not all of it")


class _Loading:
    """Reads the blocks of a weight's parts. After the last, the layer gets the codes."""

    def __init__(self, layer: nn.Module, loader: Callable[..., None], device: torch.device) -> None:
        self.layer, self.loader, self.device = layer, loader, device
        self.parts: dict[int, Codes] = {}

    def __call__(self, param: nn.Parameter, loaded_weight: LoadedTensor, *shard: object) -> None:
        found: list[tuple[Tensor, BlockTensor]] = []
        if not isinstance(loaded_weight, BlockTensor) or loaded_weight.quantization not in FORMATS:
            raise QuantizationError(
                "this weight has no blocks, and its layer was made for a GGUF file that has them"
            )

        self.loader(param, _Recorder(loaded_weight, found), *shard)

        for rows, part in found:
            codes = FORMATS[str(part.quantization)].codes(part.blocks()[...])
            self.parts[rows.storage_offset() // rows.shape[1]] = codes

        if sum(part.codes.shape[0] for part in self.parts.values()) == param.shape[0]:
            tensors = stored([part for _, part in sorted(self.parts.items())])
            self.parts = {}
            put(
                self.layer,
                {
                    name: None if each is None else each.to(self.device)
                    for name, each in tensors.items()
                },
            )


class _Recorder:
    """A tensor that notes copies, so that the layer's own loader finds this rank's part."""

    def __init__(self, loaded: BlockTensor, found: list[tuple[Tensor, BlockTensor]]) -> None:
        self.loaded, self.found = loaded, found
        self.shape, self.dtype = loaded.shape, loaded.dtype

    def narrow(self, dim: int, start: int, length: int) -> _Recorder:
        return _Recorder(self.loaded.narrow(dim, start, length), self.found)

    def __getitem__(self, index: Any) -> Tensor:
        return self.loaded[index]

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        arguments: tuple[Any, ...] = (),
        options: Any = None,
    ) -> Any:
        if function is not torch.Tensor.copy_:
            return NotImplemented
        target, source = arguments
        source.found.append((target, source.loaded))
        return target
