"""The layout of a model's cache: which layers keep the same tokens, and which tensors hold their keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from opgraft.engine.kv_cache import LayerKind
from opgraft.ops.attention import Attention
from torch import Tensor


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
    """

    layers: Mapping[str, Attention]
    groups: Sequence[Sequence[str]]
    block_size: int
    dtype: torch.dtype

    @classmethod
    def of(cls, layers: Mapping[str, Attention], block_size: int, dtype: torch.dtype) -> CacheLayout:
        """Group layers by their windows."""
        by_window: dict[int | None, list[str]] = {}
        for name, layer in layers.items():
            by_window.setdefault(layer.sliding_window, []).append(name)
        size = min(map(len, by_window.values()), default=1)
        groups = [names[i : i + size] for names in by_window.values() for i in range(0, len(names), size)]
        return cls(layers, groups, block_size, dtype)

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

    def _homes(self, num_blocks: int) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Return for each layer the tensor that it has: its place in its group and the shape."""
        return {
            name: (place, tuple(self.layers[name].kv_cache_shape(num_blocks, self.block_size)))
            for group in self.groups
            for place, name in enumerate(group)
        }
