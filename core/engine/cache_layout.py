"""The layout of a model's cache: which layers keep the same tokens, and which tensors hold their keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType

import torch
from opgraft.engine.kv_cache import LayerKind
from opgraft.errors import ConfigError
from opgraft.ops.attention.cached import CachedAttention, cache_shape
from opgraft.ops.state_space.layer import StateLayer
from torch import Tensor

CODES: Mapping[str, torch.dtype] = MappingProxyType({"int8": torch.int8, "fp8": torch.uint8})
"""Settings of ``cache.dtype`` with codes and scales → the dtype of the tensors that hold them."""


def cache_dtype(setting: str, model: torch.dtype) -> torch.dtype:
    """Return the dtype of the cache of a model of a dtype, for a setting of ``cache.dtype``.

    Raises:
        ConfigError: it is another floating-point dtype than the model's.
    """
    dtype = CODES[setting] if setting in CODES else model if setting == "auto" else getattr(torch, setting)
    if dtype.is_floating_point and dtype != model:
        raise ConfigError(
            f"cache.dtype is {setting}, and the model computes in {str(model).removeprefix('torch.')}, which keys and "
            "values would have to be converted to: set cache.dtype to auto, or to int8 or fp8 for half of bfloat16's "
            "memory, or model.dtype to the same"
        )
    return dtype


@dataclass(frozen=True)
class CacheLayout:
    """Groups of attention layers, each with a table of blocks of its own.

    A block of the pool belongs to one group at a time. So layers of different groups, whose blocks have one shape,
    share a tensor: the first of each group the first, the second the second. Groups have as many layers as the rarest
    kind, so that hardly a tensor has blocks that a group cannot use.

    Attributes:
        layers: prefix → layer.
        groups: prefixes of the layers of each group.
        block_size: tokens in a block.
        dtype: of the cache.
        states: prefix → layer that keeps a state of each sequence, in slots beside the blocks.
    """

    layers: Mapping[str, CachedAttention]
    groups: Sequence[Sequence[str]]
    block_size: int
    dtype: torch.dtype
    states: Mapping[str, StateLayer] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        layers: Mapping[str, CachedAttention],
        block_size: int,
        dtype: torch.dtype,
        states: Mapping[str, StateLayer] | None = None,
    ) -> CacheLayout:
        """Group layers by their windows.

        Raises:
            ConfigError: a layer has a layout of its own without a place for codes, which ``dtype`` is of.
        """
        if dtype in CODES.values():
            _expect_codes(layers)
        by_window: dict[int | None, list[str]] = {}
        for name, layer in layers.items():
            by_window.setdefault(layer.sliding_window, []).append(name)
        size = min(map(len, by_window.values()), default=1)
        groups = [names[i : i + size] for names in by_window.values() for i in range(0, len(names), size)]
        return cls(layers, groups, block_size, dtype, states or {})

    @property
    def kinds(self) -> list[LayerKind]:
        """Return the kind of each group."""
        return [LayerKind(self.layers[group[0]].sliding_window) for group in self.groups]

    @property
    def bytes_per_block(self) -> int:
        """Return the bytes that one block of the pool takes in all tensors."""
        return sum(prod(shape) * self.dtype.itemsize for _, shape in set(self._homes(1).values()))

    def allocate(self, num_blocks: int, device: torch.device) -> dict[str, Tensor]:
        """Return the cache of each layer. The memory is not written to until tokens are."""
        homes = self._homes(num_blocks)
        tensors = {home: torch.empty(home[1], dtype=self.dtype, device=device) for home in set(homes.values())}
        return {name: tensors[home] for name, home in homes.items()}

    @property
    def bytes_per_state(self) -> int:
        """Return the bytes that one slot takes in all layers that keep states."""
        return sum(size * dtype.itemsize for dtype, size in self._state_sizes().items())

    def allocate_states(self, num_states: int, device: torch.device) -> dict[torch.dtype, Tensor]:
        """Return for each dtype a tensor with so many slots, in which the states of all layers are side by side."""
        sizes = self._state_sizes()
        return {dtype: torch.zeros(num_states, size, dtype=dtype, device=device) for dtype, size in sizes.items()}

    def states_of_layers(self, slots: Mapping[torch.dtype, Tensor]) -> dict[str, tuple[Tensor, ...]]:
        """Return the tensors of each layer, parts of those that ``allocate_states`` has made."""
        taken = dict.fromkeys(slots, 0)
        parts: dict[str, tuple[Tensor, ...]] = {}
        for name, layer in self.states.items():
            own = []
            for shape, dtype in zip(layer.get_state_shape(), layer.get_state_dtype(), strict=True):
                part = slots[dtype][:, taken[dtype] : taken[dtype] + prod(shape)]
                own.append(part.view(len(part), *shape))
                taken[dtype] += prod(shape)
            parts[name] = tuple(own)
        return parts

    def _state_sizes(self) -> dict[torch.dtype, int]:
        sizes: dict[torch.dtype, int] = {}
        for layer in self.states.values():
            for shape, dtype in zip(layer.get_state_shape(), layer.get_state_dtype(), strict=True):
                sizes[dtype] = sizes.get(dtype, 0) + prod(shape)
        return sizes

    def _homes(self, num_blocks: int) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Return for each layer the tensor that it has: its place in its group and the shape."""
        return {
            name: (place, cache_shape(self.layers[name], num_blocks, self.block_size, self.dtype))
            for group in self.groups
            for place, name in enumerate(group)
        }


def _expect_codes(layers: Mapping[str, CachedAttention]) -> None:
    """Raise ``ConfigError`` unless each layer can be told that its cache is one of codes."""
    for name, layer in layers.items():
        if not layer.holds_codes():
            raise ConfigError(
                f"cache.dtype is int8 or fp8, and the attention layer {name!r} keeps its cache in a layout of "
                f"{type(layer).__name__}, which has no place for codes and scales, as its holds_codes() tells: set "
                "cache.dtype to auto, or disable the plugin that the class is from"
            )
