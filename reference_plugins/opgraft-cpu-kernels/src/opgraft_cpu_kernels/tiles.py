"""Weight methods that hold codes in tiles, if the path in force multiplies bytes.

A layer keeps its tiles only. In a ``state_dict``, codes, scales and offsets lie in rows, as they do
without tiles. Codes of 8 bits gain by tiles, too: in rows, each code becomes a float32 number, at
25 GB/s of a thread of Zen 4, which is slower than memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opgraft import functional
from opgraft import kernels as parts
from opgraft.kernels import (
    TILE,
    QuantizeMethodBase,
    binding_of,
    in_tiles,
    put,
    rows_of_tiles,
    scales_in_tiles,
    scales_of_tiles,
)
from opgraft.ops import VocabParallelEmbedding
from torch import Tensor

from opgraft_cpu_kernels import quantized
from opgraft_cpu_kernels.kernels import DTYPES
from opgraft_cpu_kernels.library import path_or_none

NAMES = ("weight", "scales", "offsets")
"""The parameters of a layer that are put in tiles."""


class _Tiling(QuantizeMethodBase):
    """A weight method that puts codes, scales and offsets in tiles once they are loaded."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Put the layer's codes in tiles, if its kernel is the one of this plugin."""
        super().process_weights_after_loading(layer)
        if path_or_none() not in quantized.TILED or not _can_be_tiled(layer):
            return
        tiles = {}
        for name, rows in _held(layer).items():
            tiles[name] = _in_tiles(layer, name, rows.data)
        put(layer, tiles)
        layer.register_state_dict_post_hook(_save_rows)
        layer.register_load_state_dict_pre_hook(_load_tiles)

    def remark(self, owner: Any) -> str:
        """Return the words that ``opgraft.explain`` shows about a layer."""
        return "in tiles" if owner.weight.dim() == 3 else ""


class GGUFLinearMethod(_Tiling, parts.GGUFLinearMethod):
    """Codes of the blocks of a GGUF file."""


class Int8LinearMethod(_Tiling, parts.Int8LinearMethod):
    """Codes of eight bits, made while a model is loaded."""


class Int4LinearMethod(_Tiling, parts.Int4LinearMethod):
    """Codes of four bits, made while a model is loaded."""


METHODS: Mapping[str, type[_Tiling]] = {
    "gguf_linear_method": GGUFLinearMethod,
    "int8_linear_method": Int8LinearMethod,
    "int4_linear_method": Int4LinearMethod,
}
"""Name of a weight method → the class that replaces it."""


def _can_be_tiled(layer: Any) -> bool:
    """Return True if the codes of a layer fill tiles, and the layer calls this plugin's kernel."""
    binding = binding_of(functional.quantized_linear)
    if binding.function("quantized_linear") is not quantized.quantized_linear:
        return False
    weight = layer.weight
    if weight.dim() != 2 or not weight.is_cpu or layer.scales.dtype not in DTYPES:
        return False
    rows, groups = layer.scales.shape
    if rows == 0 or rows % TILE:
        return False
    # A group must begin at the edge of a tile. One group for all inputs always does.
    whole: bool = groups == 1 or _inputs(layer) % (groups * TILE) == 0
    return whole


def _inputs(layer: Any) -> int:
    """Return the number of columns of a layer's weight."""
    if isinstance(layer, VocabParallelEmbedding):
        return layer.embedding_dim
    return layer.input_size_per_partition  # type: ignore[no-any-return]


def _held(layer: Any) -> dict[str, Tensor]:
    """Return the parameters of NAMES that a layer has."""
    parameters = {name: layer._parameters.get(name) for name in NAMES}
    return {name: each for name, each in parameters.items() if each is not None}


def _in_tiles(layer: Any, name: str, rows: Tensor) -> Tensor:
    if name == "weight":
        return in_tiles(rows, _inputs(layer))
    return scales_in_tiles(rows)


def _in_rows(layer: Any, name: str, tiles: Tensor) -> Tensor:
    if name == "weight":
        return rows_of_tiles(tiles, _inputs(layer))
    return scales_of_tiles(tiles)


def _save_rows(layer: Any, state_dict: dict[str, Tensor], prefix: str, metadata: object) -> None:
    for name in _held(layer):
        key = f"{prefix}{name}"
        state_dict[key] = _in_rows(layer, name, state_dict[key])


def _load_tiles(layer: Any, state_dict: dict[str, Tensor], prefix: str, *others: object) -> None:
    """Put loaded rows in tiles. A tensor of another shape stays, and torch reports the shape."""
    for name, tiles in _held(layer).items():
        key = f"{prefix}{name}"
        given = state_dict.get(key)
        # On the device "meta" only the shape is computed.
        expected = _in_rows(layer, name, tiles.to("meta")).shape
        if given is not None and given.shape == expected:
            state_dict[key] = _in_tiles(layer, name, given)
