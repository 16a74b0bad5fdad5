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
from opgraft.ops.weights import LoadedTensor
from opgraft.quantization.codes import Codes, stored
from opgraft.quantization.gguf_blocks import FORMATS
from opgraft.quantization.online import LooksUpCodes, create_deferred_weight, put
from opgraft.quantization.patterns import names_of
from torch import Tensor, nn


@runtime_checkable
class BlockTensor(LoadedTensor, Protocol):
    """A tensor in blocks of a file."""

    @property
    def quantization(self) -> str | None:
        """The type of the blocks; ``None`` for a tensor without blocks."""

    def blocks(self) -> Any:
        """Return the same rows as bytes."""


@PluggableClass.register("gguf")
class GGUFConfig(QuantizationConfig):
    """Linear layers and embeddings hold the blocks of a GGUF file.

    Blocks of types that are not in ``FORMATS`` are read as numbers, and so are blocks of an
    embedding with padded rows.

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
        is_embedding = isinstance(layer, VocabParallelEmbedding) and layer.is_unpadded
        if not is_embedding and not isinstance(layer, LinearBase):
            return None
        names = [prefix, *names_of(prefix, self.packed_modules_mapping)]
        weights = [f"{name}.weight" for name in names]
        kinds = {self.types[weight] for weight in weights if weight in self.types}
        if not kinds or not kinds <= set(FORMATS):
            return None
        method: QuantizeMethodBase = GGUFLinearMethod(sorted(kinds))
        return method


@PluggableClass.register("gguf_linear_method")
class GGUFLinearMethod(LooksUpCodes, LinearMethodBase):
    """Holds ``weight``, ``scales`` and ``offsets`` for ``quantized_linear``.

    Args:
        kinds: the types of blocks in the layer. A merged layer may have several.
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
        # A block has one scale, which cannot be cut.
        for kind in self.kinds:
            values = FORMATS[kind].values
            if input_size_per_partition % values:
                raise QuantizationError(
                    f"{layer.prefix or type(layer).__name__} has {input_size_per_partition} inputs "
                    f"on this rank, which blocks of {values}, as {kind} has them, do not divide: "
                    "take fewer ranks, or put the layer on the list quantization.skip, which "
                    "reads its blocks as numbers"
                )
        shape = (sum(output_partition_sizes), input_size_per_partition)
        loader = extra_weight_attrs.pop("weight_loader")
        loading = _BlockLoader(layer, loader, torch.get_default_device())
        create_deferred_weight(layer, shape, params_dtype, loading, **extra_weight_attrs)

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


class _BlockLoader:
    """Reads the blocks of a weight's parts. After the last part, the layer gets the codes.

    Attributes:
        parts: first row of a part → codes.
    """

    def __init__(self, layer: nn.Module, loader: Callable[..., None], device: torch.device) -> None:
        self.layer = layer
        self.loader = loader
        self.device = device
        self.parts: dict[int, Codes] = {}

    def __call__(self, param: nn.Parameter, loaded_weight: LoadedTensor, *shard: object) -> None:
        if not isinstance(loaded_weight, BlockTensor) or loaded_weight.quantization not in FORMATS:
            raise QuantizationError(
                "this weight has no blocks, and its layer was made for a GGUF file that has them"
            )
        # The layer's loader knows this rank's part. It copies numbers, and here blocks are wanted.
        copies: list[tuple[Tensor, BlockTensor]] = []
        self.loader(param, _CopyRecorder(loaded_weight, copies), *shard)
        for rows, part in copies:
            codes = FORMATS[str(part.quantization)].codes(part.blocks()[...])
            first_row = int(rows.storage_offset()) // rows.shape[1]
            self.parts[first_row] = codes
        # A weight with too many rows counts as not loaded, too.
        if sum(part.codes.shape[0] for part in self.parts.values()) != param.shape[0]:
            return
        tensors = stored([part for _, part in sorted(self.parts.items())])
        # The parts would double the memory.
        self.parts = {}
        on_device = {}
        for name, tensor in tensors.items():
            on_device[name] = None if tensor is None else tensor.to(self.device)
        put(self.layer, on_device)


class _CopyRecorder:
    """A tensor that notes copies, so that the layer's own loader finds this rank's part."""

    def __init__(self, loaded: BlockTensor, found: list[tuple[Tensor, BlockTensor]]) -> None:
        self.loaded = loaded
        self.found = found
        self.shape = loaded.shape
        self.dtype = loaded.dtype

    def narrow(self, dim: int, start: int, length: int) -> _CopyRecorder:
        return _CopyRecorder(self.loaded.narrow(dim, start, length), self.found)

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
