"""Weight methods that hold codes in tiles, where the path in force multiplies bytes.

Only the tiles are kept. In a ``state_dict`` codes, scales and offsets lie in rows, as they do without. Codes of 8 bits
gain by tiles too: in rows each becomes a float32 number, at 25 GB/s a thread (Zen 4), which is less than memory gives.
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
"""The parameters of a layer that lie in tiles."""


class _Tiling(QuantizeMethodBase):
    """A way to hold codes, with scales and perhaps offsets, that has them in tiles."""

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        if path_or_none() in quantized.TILED and _can_be_tiled(layer):
            put(
                layer,
                {name: _in_tiles(layer, name, each.data) for name, each in _held(layer).items()},
            )
            layer.register_state_dict_post_hook(_save_rows)
            layer.register_load_state_dict_pre_hook(_load_tiles)

    def remark(self, owner: Any) -> str:
        return "in tiles" if owner.weight.dim() == 3 else ""


class GGUFLinearMethod(_Tiling, parts.GGUFLinearMethod):
    """Holds the codes of a GGUF file's blocks."""


class Int8LinearMethod(_Tiling, parts.Int8LinearMethod):
    """Holds codes of eight bits that are made while loading."""


class Int4LinearMethod(_Tiling, parts.Int4LinearMethod):
    """Holds codes of four bits that are made while loading."""


METHODS: Mapping[str, type[_Tiling]] = {
    "gguf_linear_method": GGUFLinearMethod,
    "int8_linear_method": Int8LinearMethod,
    "int4_linear_method": Int4LinearMethod,
}
"""Name of a weight method → the class that takes its place."""


def _can_be_tiled(layer: Any) -> bool:
    """Tell whether the codes of a layer fill tiles, and the kernel that takes these is the one that it calls."""
    rows, groups = layer.scales.shape
    known = binding_of(functional.quantized_linear).function("quantized_linear")
    whole: bool = groups == 1 or _inputs(layer) % (groups * TILE) == 0
    fits = whole and rows > 0 and rows % TILE == 0 and layer.weight.dim() == 2
    return (
        fits
        and layer.scales.dtype in DTYPES
        and layer.weight.is_cpu
        and known is quantized.quantized_linear
    )


def _inputs(layer: Any) -> int:
    size: int = (
        layer.embedding_dim
        if isinstance(layer, VocabParallelEmbedding)
        else layer.input_size_per_partition
    )
    return size


def _held(layer: Any) -> dict[str, Tensor]:
    return {name: each for name in NAMES if (each := layer._parameters.get(name)) is not None}


def _in_tiles(layer: Any, name: str, rows: Tensor) -> Tensor:
    return in_tiles(rows, _inputs(layer)) if name == "weight" else scales_in_tiles(rows)


def _in_rows(layer: Any, name: str, tiles: Tensor) -> Tensor:
    return rows_of_tiles(tiles, _inputs(layer)) if name == "weight" else scales_of_tiles(tiles)


def _save_rows(layer: Any, state_dict: dict[str, Tensor], prefix: str, metadata: object) -> None:
    for name in _held(layer):
        state_dict[f"{prefix}{name}"] = _in_rows(layer, name, state_dict[f"{prefix}{name}"])


def _load_tiles(layer: Any, state_dict: dict[str, Tensor], prefix: str, *others: object) -> None:
    """Bring what is to be loaded into tiles; what has another shape stays, and torch says so."""
    for name, held in _held(layer).items():
        given = state_dict.get(f"{prefix}{name}")
        if given is not None and given.shape == _in_rows(layer, name, held.to("meta")).shape:
            state_dict[f"{prefix}{name}"] = _in_tiles(layer, name, given)
