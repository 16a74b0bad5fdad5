"""The way from a name in a checkpoint to the parameter that takes the tensor, told by tables of the model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import nn

ShardId = str | int | tuple[int, str]

CACHE_SCALES: Sequence[str] = (
    "*attn*.k_scale",
    "*attn*.v_scale",
    "*attn*.kv_scale",
    "*attn*.k_proj.output_scale",
    "*attn*.v_proj.output_scale",
)
"""Patterns of fixed scales for a layer's cache, as ModelOpt, AutoFP8, Quark and compressed-tensors name them."""

IGNORED: Sequence[str] = (
    "*rotary_emb.inv_freq",
    "*rotary_emb.cos_cached",
    "*rotary_emb.sin_cached",
    "*embeddings.position_ids",
    *CACHE_SCALES,
)
"""Patterns of tensors that models compute themselves: tables, positions, scales of 8-bit caches."""


@dataclass(frozen=True)
class WeightsMapper:
    """Changes of names by data, applied in this order; a part that is changed to None drops the tensor.

    Attributes:
        prefixes: the first that a name begins with is changed.
        substrings: each is changed wherever it occurs.
        suffixes: the first that a name ends with is changed.
        base: the path of the base model. A checkpoint of the base model alone has names without it,
            and a model that is a base model is also loaded from a checkpoint that has it.
    """

    prefixes: Mapping[str, str | None] = field(default_factory=dict)
    substrings: Mapping[str, str | None] = field(default_factory=dict)
    suffixes: Mapping[str, str | None] = field(default_factory=dict)
    base: str = ""

    def spellings(self, name: str) -> Sequence[str]:
        """Return the names that a tensor may have in the model, none if it is dropped."""
        names = [name]
        if self.base:
            prefix = f"{self.base}."
            names.append(name.removeprefix(prefix) if name.startswith(prefix) else prefix + name)
        mapped = [self.map(each) for each in names]
        if mapped[0] is None:
            return ()
        return list(dict.fromkeys(each for each in mapped if each is not None))

    def map(self, name: str) -> str | None:
        """Return the name in the model, or None for a tensor that is dropped."""
        changed: str | None = name
        for old, new in self.prefixes.items():
            if name.startswith(old):
                changed = None if new is None else new + name[len(old) :]
                break
        for old, new in self.substrings.items():
            if changed is not None and old in changed:
                changed = None if new is None else changed.replace(old, new)
        for old, new in self.suffixes.items():
            if changed is not None and changed.endswith(old):
                return None if new is None else changed.removesuffix(old) + new
        return changed


@runtime_checkable
class HasPackedModules(Protocol):
    """A module that keeps several layers of the checkpoint as one.

    ``packed_modules_mapping`` has, by the name of such a layer, the names in the checkpoint and the ``shard_id`` under
    which each reaches ``weight_loader``: ``{"qkv_proj": {"q_proj": "q", "k_proj": "k", "v_proj": "v"}}``. Skip lists of
    quantization read the same table.
    """

    packed_modules_mapping: ClassVar[Mapping[str, Mapping[str, ShardId | None]]]


@runtime_checkable
class HasPartsElsewhere(Protocol):
    """A module of which other ranks have some parts, whole."""

    def parts_elsewhere(self) -> Collection[str]:
        """Return the names of these parts below the module."""


@dataclass(frozen=True)
class Target:
    """A parameter or buffer by its name in the model.

    Attributes:
        name: the name in the model.
        tensor: the tensor to be filled.
        shard_id: the part of it that is meant; None for all.
        source: the name of that part in the checkpoint, as the model knows it.
    """

    name: str
    tensor: torch.Tensor
    shard_id: ShardId | None
    source: str


class Targets:
    """The parameters and persistent buffers of a model, and the names under which a checkpoint may have them."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
        self._tables = [
            (f"{path}." if path else "", module.packed_modules_mapping)
            for path, module in model.named_modules()
            if isinstance(module, HasPackedModules)
        ]
        self._elsewhere = {
            f"{path}.{part}" if path else part
            for path, module in model.named_modules()
            if isinstance(module, HasPartsElsewhere)
            for part in module.parts_elsewhere()
        }
        self.by_source = {
            target.source: target for name in self.tensors for target in self._parts(name)
        }

        self._layers = {source.rpartition(".")[0] for source in self.by_source}

    def _parts(self, name: str) -> Iterator[Target]:
        """Yield the whole, and the parts that a checkpoint may have in its place."""
        yield Target(name, self.tensors[name], None, name)
        layer = name.rpartition(".")[0]
        for part, shard in getattr(self.tensors[name], "checkpoint_parts", {}).items():
            yield Target(name, self.tensors[name], shard, ".".join(filter(None, (layer, part))))
        for prefix, table in self._tables:
            layer, _, last = name.rpartition(".")
            outer, _, layer_name = layer.rpartition(".")
            if name.startswith(prefix) and layer_name in table:
                for part, shard_id in table[layer_name].items():
                    yield Target(
                        name,
                        self.tensors[name],
                        shard_id,
                        ".".join(filter(None, (outer, part, last))),
                    )

    def has_layer(self, layer: str) -> bool:
        """Return True if this rank takes tensors of the checkpoint's layer ``layer``."""
        return layer in self._layers

    def spelled(self, names: Sequence[str]) -> str | None:
        """Return the first name that this rank's part of the model has, or another's; else the first.

        Returns:
            The name, ``None`` for no names.
        """
        for name in names:
            if name in self.by_source or self.is_elsewhere(name):
                return name
        return names[0] if names else None

    def is_elsewhere(self, name: str) -> bool:
        """Return True if a tensor of that name is for other ranks."""
        parts = name.split(".") if self._elsewhere else ()
        return any(".".join(parts[:end]) in self._elsewhere for end in range(1, len(parts)))

    def missing(self, found: Sequence[Target]) -> list[str]:
        """Return the names in the checkpoint of what ``found`` leaves unfilled."""
        whole = {id(target.tensor) for target in found if target.shard_id is None}
        parts = {(id(target.tensor), target.shard_id) for target in found}
        packed = {
            id(target.tensor) for target in self.by_source.values() if target.shard_id is not None
        }
        started = {tensor for tensor, _ in parts}
        missing: dict[tuple[int, ShardId | None], str] = {}
        for source, target in self.by_source.items():
            key = id(target.tensor)
            by_parts = target.shard_id is not None
            if (
                key not in whole
                and (key, target.shard_id) not in parts
                and by_parts == (key in packed)
            ):
                missing.setdefault(
                    (key, target.shard_id), source + (" (a part)" if key in started else "")
                )
        return list(missing.values())


def is_ignored(name: str, patterns: Sequence[str]) -> bool:
    """Tell whether a name matches one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
