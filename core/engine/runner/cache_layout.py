"""The layout of a model's cache: which layers keep the same tokens, and which tensors hold their keys and values."""

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
"""Settings of ``cache.dtype`` with codes and scales → the dtype of the tensors that hold them."""


def cache_dtype(setting: str, model: torch.dtype) -> torch.dtype:
    """Return the dtype of the cache of a model of a dtype, for a setting of ``cache.dtype``.

    Raises:
        ConfigError: it is another floating-point dtype than the model's.
    """
    dtype = (
        CODES[setting]
        if setting in CODES
        else model
        if setting == "auto"
        else getattr(torch, setting)
    )
    if dtype.is_floating_point and dtype != model:
        raise ConfigError(
            f"cache.dtype is {setting}, and the model computes in {str(model).removeprefix('torch.')}, which keys and "
            "values would have to be converted to: set cache.dtype to auto, or to int8 or fp8 for half of bfloat16's "
            "memory, or model.dtype to the same"
        )
    return dtype


@dataclass(frozen=True)
class CacheSizes:
    """A layout in numbers, as it goes from a worker to the engine.

    Attributes:
        windows: the sliding window of each group.
        layers: how many layers have each window.
        block_size: tokens in a block.
        bytes_per_block: bytes that a block takes; 0 without attention.
        bytes_per_state: bytes that the state of a sequence takes; 0 where no layer keeps one.
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

    A block of the pool belongs to one group at a time. So layers of different groups, whose blocks
    have one shape, share a tensor: the first of each group the first, the second the second. Groups
    have as many layers as the rarest kind, so that hardly a tensor has blocks that a group cannot
    use.

    Attributes:
        layers: prefix → layer.
        groups: prefixes of the layers of each group. A stage of a pipeline may have no layer of one
            that others have.
        windows: the sliding window of each group.
        block_size: tokens in a block.
        dtype: of the cache.
        states: prefix → layer that keeps a state of each sequence, in slots beside the blocks.
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
            ConfigError: a layer has a layout of its own without a place for codes, which ``dtype``
                is of.
        """
        if dtype in CODES.values():
            _expect_codes(layers)
        by_window = _by_window(layers)
        size = min(map(len, by_window.values()), default=1)
        groups = [
            (window, names[i : i + size])
            for window, names in by_window.items()
            for i in range(0, len(names), size)
        ]
        windows = [window for window, _ in groups]
        return cls(layers, [names for _, names in groups], windows, block_size, dtype, states or {})

    def grouped(self, windows: Sequence[int | None]) -> CacheLayout:
        """Return the layout with its layers in groups of these windows, about as many in each of a window."""
        groups: list[list[str]] = [[] for _ in windows]
        for window, names in _by_window(self.layers).items():
            places = [place for place, each in enumerate(windows) if each == window]
            for number, name in enumerate(names):
                groups[places[number * len(places) // len(names)]].append(name)
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
        """Return the bytes that one block of the pool takes in all tensors."""
        return sum(prod(shape) * self.dtype.itemsize for _, shape in set(self._homes(1).values()))

    def tokens(self, num_blocks: int) -> int:
        """Return how many tokens of long sequences so many blocks hold."""
        full = sum(kind.sliding_window is None for kind in self.kinds) or len(self.kinds) or 1
        return num_blocks // full * self.block_size

    def blocks(self, num_tokens: int) -> int:
        """Return how many blocks a sequence of ``num_tokens`` takes while it is generated."""
        return sum(kind.most_blocks(num_tokens, 1, self.block_size) for kind in self.kinds)

    def allocate(self, num_blocks: int, device: torch.device) -> dict[str, Tensor]:
        """Return the cache of each layer. The memory is not written to until tokens are."""
        homes = self._homes(num_blocks)
        tensors = {
            home: torch.empty(home[1], dtype=self.dtype, device=device)
            for home in set(homes.values())
        }
        if device.type == HOST:
            expect_huge_pages(
                range(each.data_ptr(), each.data_ptr() + each.nbytes) for each in tensors.values()
            )
        return {name: tensors[home] for name, home in homes.items()}

    @property
    def bytes_per_state(self) -> int:
        """Return the bytes that one slot takes in all layers that keep states."""
        return sum(size * dtype.itemsize for dtype, size in self._state_sizes().items())

    def allocate_states(self, num_states: int, device: torch.device) -> dict[torch.dtype, Tensor]:
        """Return for each dtype a tensor with so many slots, in which the states of all layers are side by side."""
        sizes = self._state_sizes()
        return {
            dtype: torch.zeros(num_states, size, dtype=dtype, device=device)
            for dtype, size in sizes.items()
        }

    def states_of_layers(
        self, slots: Mapping[torch.dtype, Tensor]
    ) -> dict[str, tuple[Tensor, ...]]:
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


def windows_of_all(ranks: Sequence[CacheSizes]) -> Sequence[int | None]:
    """Return the windows of groups that the layers of all stages of a pipeline go into, whose blocks have one table."""
    if all(each.windows == ranks[0].windows for each in ranks):
        return ranks[0].windows
    counts = sum((Counter(each.layers) for each in ranks), Counter[int | None]())
    size = min(counts.values())
    return [window for window, count in counts.items() for _ in range(-(-count // size))]


def _by_window(layers: Mapping[str, CachedAttention]) -> dict[int | None, list[str]]:
    found: dict[int | None, list[str]] = {}
    for name, layer in layers.items():
        found.setdefault(layer.sliding_window, []).append(name)
    return found


def _expect_codes(layers: Mapping[str, CachedAttention]) -> None:
    """Raise ``ConfigError`` unless each layer can be told that its cache is one of codes."""
    for name, layer in layers.items():
        if not layer.holds_codes():
            raise ConfigError(
                f"cache.dtype is int8 or fp8, and the attention layer {name!r} keeps its cache in a layout of "
                f"{type(layer).__name__}, which has no place for codes and scales, as its holds_codes() tells: set "
                "cache.dtype to auto, or disable the plugin that the class is from, if it is from one"
            )
