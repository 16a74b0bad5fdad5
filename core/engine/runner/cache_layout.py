"""The layout of a model's cache: groups of layers, and the tensors with their keys and values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from types import MappingProxyType

import torch
from opgraft.engine.schedule.kv_cache import LayerKind
from opgraft.errors import ConfigError
from opgraft.machine.memory import expect_huge_pages
from opgraft.ops.attention.cached import CachedAttention, cache_shape
from opgraft.ops.state_space.layer import StateLayer
from opgraft.platform import HOST
from torch import Tensor

CODES: Mapping[str, torch.dtype] = MappingProxyType({"int8": torch.int8, "fp8": torch.uint8})
"""Settings of ``cache.dtype`` with codes and scales → the dtype of the tensors."""


def cache_dtype(setting: str, model: torch.dtype) -> torch.dtype:
    """Return the dtype of the cache.

    Args:
        setting: of ``cache.dtype``.
        model: dtype of the model.

    Raises:
        ConfigError: the setting is a floating-point dtype, and not the model's.
    """
    if setting in CODES:
        return CODES[setting]
    if setting == "auto":
        return model
    dtype: torch.dtype = getattr(torch, setting)
    if dtype.is_floating_point and dtype != model:
        raise ConfigError(
            f"cache.dtype is {setting}, and the model computes in "
            f"{str(model).removeprefix('torch.')}, which keys and values would have to be "
            "converted to: set cache.dtype to auto, or to int8 or fp8 for half of bfloat16's "
            "memory, or model.dtype to the same"
        )
    return dtype


@dataclass(frozen=True)
class CacheSizes:
    """A layout in numbers, on its way from a worker to the engine.

    Attributes:
        windows: the sliding window of each group.
        layers: number of layers with each window.
        block_size: tokens in a block.
        bytes_per_block: bytes of a block; 0 without attention.
        bytes_per_state: bytes of the state of a sequence; 0 if no layer keeps states.
    """

    windows: Sequence[int | None]
    layers: Mapping[int | None, int]
    block_size: int
    bytes_per_block: int
    bytes_per_state: int

    @property
    def kinds(self) -> list[LayerKind]:
        """Return the kind of each group."""
        return list(map(LayerKind, self.windows))


@dataclass(frozen=True)
class CacheLayout:
    """Groups of attention layers, each with a table of blocks of its own.

    A block of the pool belongs to one group at a time. So layers of different groups with blocks of
    one shape share a tensor: the first layers of all groups share one, the second layers another.
    Groups have as many layers as the rarest kind. Then hardly a tensor has blocks without use for
    some group.

    For example, of 12 layers with a window and 4 without, the groups are 3 groups with a window and
    one without, of 4 layers each. They share 4 tensors.

    Attributes:
        layers: prefix → layer.
        groups: prefixes of the layers of each group. A stage of a pipeline may have empty groups.
        windows: the sliding window of each group.
        block_size: tokens in a block.
        dtype: of the cache.
        states: prefix → layer with a state of each sequence, in slots beside the blocks.
    """

    layers: Mapping[str, CachedAttention]
    groups: Sequence[Sequence[str]]
    windows: Sequence[int | None]
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
            ConfigError: ``dtype`` is one of codes, and a layer has a layout without a place for
                codes.
        """
        if dtype in CODES.values():
            _expect_codes(layers)
        by_window = _by_window(layers)
        size = min(map(len, by_window.values()), default=1)
        groups = []
        windows = []
        for window, names in by_window.items():
            for first in range(0, len(names), size):
                groups.append(names[first : first + size])
                windows.append(window)
        return cls(layers, groups, windows, block_size, dtype, states or {})

    def grouped(self, windows: Sequence[int | None]) -> CacheLayout:
        """Return the layout with other groups, of these windows.

        Groups of one window have about the same number of layers.
        """
        groups: list[list[str]] = [[] for _ in windows]
        for window, names in _by_window(self.layers).items():
            places = [place for place, each in enumerate(windows) if each == window]
            for number, name in enumerate(names):
                place = places[number * len(places) // len(names)]
                groups[place].append(name)
        return replace(self, groups=groups, windows=windows)

    @property
    def kinds(self) -> list[LayerKind]:
        """Return the kind of each group."""
        return list(map(LayerKind, self.windows))

    def sizes(self) -> CacheSizes:
        """Return the layout in numbers."""
        counts = Counter(layer.sliding_window for layer in self.layers.values())
        return CacheSizes(
            self.windows, counts, self.block_size, self.bytes_per_block, self.bytes_per_state
        )

    @property
    def bytes_per_block(self) -> int:
        """Return the bytes of one block of the pool, in all tensors."""
        tensors_of_one_block = set(self._homes(1).values())
        return sum(prod(shape) * self.dtype.itemsize for _, shape in tensors_of_one_block)

    def tokens(self, num_blocks: int) -> int:
        """Return the number of tokens of long sequences in so many blocks."""
        full = sum(kind.sliding_window is None for kind in self.kinds) or len(self.kinds) or 1
        return num_blocks // full * self.block_size

    def blocks(self, num_tokens: int) -> int:
        """Return the number of blocks for a sequence of ``num_tokens`` during decoding."""
        return sum(kind.most_blocks(num_tokens, 1, self.block_size) for kind in self.kinds)

    def allocate(self, num_blocks: int, device: torch.device) -> dict[str, Tensor]:
        """Return the cache of each layer. Nothing is written to the memory yet."""
        homes = self._homes(num_blocks)
        tensors = {
            home: torch.empty(home[1], dtype=self.dtype, device=device)
            for home in set(homes.values())
        }
        if device.type == HOST:
            expect_huge_pages(map(_addresses, tensors.values()))
        return {name: tensors[home] for name, home in homes.items()}

    @property
    def bytes_per_state(self) -> int:
        """Return the bytes of one slot, in all layers with states."""
        return sum(size * dtype.itemsize for dtype, size in self._state_sizes().items())

    def allocate_states(self, num_states: int, device: torch.device) -> dict[torch.dtype, Tensor]:
        """Return for each dtype a tensor ``[num_states, numbers]``: a row for each slot.

        A row holds the states of all layers side by side.
        """
        return {
            dtype: torch.zeros(num_states, size, dtype=dtype, device=device)
            for dtype, size in self._state_sizes().items()
        }

    def states_of_layers(
        self, slots: Mapping[torch.dtype, Tensor]
    ) -> dict[str, tuple[Tensor, ...]]:
        """Return the tensors of each layer, as parts of the tensors from ``allocate_states``."""
        taken = dict.fromkeys(slots, 0)
        parts: dict[str, tuple[Tensor, ...]] = {}
        for name, layer in self.states.items():
            own = []
            for shape, dtype in zip(layer.get_state_shape(), layer.get_state_dtype(), strict=True):
                begin = taken[dtype]
                end = begin + prod(shape)
                part = slots[dtype][:, begin:end]
                own.append(part.view(len(part), *shape))
                taken[dtype] = end
            parts[name] = tuple(own)
        return parts

    def _state_sizes(self) -> dict[torch.dtype, int]:
        sizes: dict[torch.dtype, int] = {}
        for layer in self.states.values():
            for shape, dtype in zip(layer.get_state_shape(), layer.get_state_dtype(), strict=True):
                sizes[dtype] = sizes.get(dtype, 0) + prod(shape)
        return sizes

    def _homes(self, num_blocks: int) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Return the tensor of each layer, named by the place in the group and the shape."""
        homes = {}
        for group in self.groups:
            for place, name in enumerate(group):
                layer = self.layers[name]
                shape = cache_shape(layer, num_blocks, self.block_size, self.dtype)
                homes[name] = (place, shape)
        return homes


def windows_of_all(ranks: Sequence[CacheSizes]) -> Sequence[int | None]:
    """Return the windows of one set of groups for the layers of all stages of a pipeline.

    One table of blocks serves all stages, so all need the same groups.
    """
    if all(each.windows == ranks[0].windows for each in ranks):
        return ranks[0].windows
    counts = sum((Counter(each.layers) for each in ranks), Counter[int | None]())
    size = min(counts.values())
    windows: list[int | None] = []
    for window, count in counts.items():
        windows += [window] * -(-count // size)
    return windows


def _addresses(tensor: Tensor) -> range:
    begin = tensor.data_ptr()
    return range(begin, begin + tensor.nbytes)


def _by_window(layers: Mapping[str, CachedAttention]) -> dict[int | None, list[str]]:
    found: dict[int | None, list[str]] = {}
    for name, layer in layers.items():
        found.setdefault(layer.sliding_window, []).append(name)
    return found


def _expect_codes(layers: Mapping[str, CachedAttention]) -> None:
    """Check that each layer has a layout with a place for codes.

    Raises:
        ConfigError: a layer has none.
    """
    for name, layer in layers.items():
        if not layer.holds_codes():
            raise ConfigError(
                f"cache.dtype is int8 or fp8, and the attention layer {name!r} keeps its cache in "
                f"a layout of {type(layer).__name__}, which has no place for codes and scales, as "
                "its holds_codes() tells: set cache.dtype to auto, or disable the plugin that the "
                "class is from, if it is from one"
            )
