"""Weight methods that hold codes in tiles of outputs, where the path in force multiplies bytes.

Only the tiles are kept. In a ``state_dict`` codes lie as they do without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opgraft.ops.embedding.vocab import VocabParallelEmbedding
from opgraft.ops.linear.methods import QuantizeMethodBase
from opgraft.ops.quantized_linear.storage import (
    TILE,
    TILED_INPUTS,
    in_tiles,
    rows_of_tiles,
    scales_in_tiles,
    scales_of_tiles,
)
from opgraft.quantization import gguf
from opgraft.quantization.integers import Int4LinearMethod as Int4
from opgraft.quantization.integers import Int8LinearMethod as Int8
from opgraft.quantization.online import put
from torch import Tensor

from opgraft_cpu_kernels.library import path_or_none
from opgraft_cpu_kernels.quantized import TILED

SCALES = ("scales", "offsets")


class _Tiled(QuantizeMethodBase):
    """A way to hold codes, with scales and perhaps offsets, that has them in tiles."""

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        if path_or_none() in TILED and _can_be_tiled(layer):
            _put_in_tiles(layer)

    def remark(self, owner: Any) -> str:
        return "in tiles of outputs" if owner.weight.dim() == 3 else ""


class GGUFLinearMethod(_Tiled, gguf.GGUFLinearMethod):
    """Holds the codes of a GGUF file's blocks."""


class Int8LinearMethod(_Tiled, Int8):
    """Holds codes of eight bits that are made while loading."""


class Int4LinearMethod(_Tiled, Int4):
    """Holds codes of four bits that are made while loading."""


METHODS: Mapping[str, type[_Tiled]] = {
    "gguf_linear_method": GGUFLinearMethod,
    "int8_linear_method": Int8LinearMethod,
    "int4_linear_method": Int4LinearMethod,
}
"""Name of a weight method → the class that takes its place."""


def _inputs(layer: Any) -> int:
    size: int = layer.embedding_dim if isinstance(layer, VocabParallelEmbedding) else layer.input_size_per_partition
    return size


def _can_be_tiled(layer: Any) -> bool:
    rows, groups = layer.scales.shape
    whole: bool = groups == 1 or _inputs(layer) % (groups * TILED_INPUTS) == 0
    fits = whole and rows > 0 and rows % TILE == 0
    return fits and bool(layer.weight.is_cpu) and layer.weight.dim() == 2


def _put_in_tiles(layer: Any) -> None:
    held = {name: layer._parameters.get(name) for name in SCALES}
    tensors = {name: None if each is None else scales_in_tiles(each.data) for name, each in held.items()}
    put(layer, {"weight": in_tiles(layer.weight.data, _inputs(layer)), **tensors})
    layer.register_state_dict_post_hook(_save_rows)
    layer.register_load_state_dict_pre_hook(_load_tiles)


def _save_rows(layer: Any, state_dict: dict[str, Tensor], prefix: str, metadata: object) -> None:
    state_dict[f"{prefix}weight"] = rows_of_tiles(state_dict[f"{prefix}weight"], _inputs(layer))
    for name in {f"{prefix}{name}" for name in SCALES} & {*state_dict}:
        state_dict[name] = scales_of_tiles(state_dict[name])


def _load_tiles(layer: Any, state_dict: dict[str, Tensor], prefix: str, *others: object) -> None:
    if f"{prefix}weight" in state_dict:
        state_dict[f"{prefix}weight"] = in_tiles(state_dict[f"{prefix}weight"], _inputs(layer))
    for name in {f"{prefix}{name}" for name in SCALES} & {*state_dict}:
        state_dict[name] = scales_in_tiles(state_dict[name])
