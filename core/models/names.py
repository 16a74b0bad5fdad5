"""From the name of a tensor in a checkpoint to the parameter of the model, by tables."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import ClassVar, Protocol, TypeGuard

import torch
from torch import nn

ShardId = str | int | tuple[int, str]
"""The part of a merged parameter, such as ``"q"`` or ``0``."""

CACHE_SCALES: Sequence[str] = (
    "*attn*.k_scale",
    "*attn*.v_scale",
    "*attn*.kv_scale",
    "*attn*.k_proj.output_scale",
    "*attn*.v_proj.output_scale",
)
"""Fixed scales for a layer's cache: patterns for ModelOpt, AutoFP8, Quark, compressed-tensors."""

IGNORED: Sequence[str] = (
    "*rotary_emb.inv_freq",
    "*rotary_emb.cos_cached",
    "*rotary_emb.sin_cached",
    "*embeddings.position_ids",
    *CACHE_SCALES,
)
"""Patterns of tensors that models compute: tables, positions, scales of 8-bit caches."""


@dataclass(frozen=True)
class WeightsMapper:
    """Changes of names as data: prefixes first, then substrings, then suffixes.

    A change to ``None`` drops the tensor. Example: ``WeightsMapper(prefixes={"bert.": "model."})``.

    Attributes:
        prefixes: the first prefix that matches is changed.
        substrings: each is changed at each place.
        suffixes: the first suffix that matches is changed.
        base: the path of the base model. Names in a checkpoint of the base model alone lack the
            path. If the model is the base model, names may still have the path.
    """

    prefixes: Mapping[str, str | None] = field(default_factory=dict)
    substrings: Mapping[str, str | None] = field(default_factory=dict)
    suffixes: Mapping[str, str | None] = field(default_factory=dict)
    base: str = ""

    def spellings(self, name: str) -> Sequence[str]:
        """Return the possible names of a tensor in the model; no name if the tensor is dropped."""
        names = [name]
        if self.base:
            prefix = f"{self.base}."
            without = name.removeprefix(prefix)
            names.append(without if without != name else prefix + name)
        mapped = [self.map(each) for each in names]
        # The tables are written for the names of the checkpoint, so the first name decides.
        if mapped[0] is None:
            return ()
        # A dictionary drops a name that occurs twice, and keeps the order.
        return list(dict.fromkeys(each for each in mapped if each is not None))

    def map(self, name: str) -> str | None:
        """Return the name in the model; ``None`` for a tensor that is dropped."""
        for old, new in self.prefixes.items():
            if name.startswith(old):
                if new is None:
                    return None
                name = new + name[len(old) :]
                break
        for old, new in self.substrings.items():
            if old in name:
                if new is None:
                    return None
                name = name.replace(old, new)
        for old, new in self.suffixes.items():
            if name.endswith(old):
                return None if new is None else name.removesuffix(old) + new
        return name


class HasPackedModules(Protocol):
    """A module with merged layers, each made of several layers of the checkpoint.

    ``packed_modules_mapping`` has merged layer → layer of the checkpoint → ``shard_id`` for the
    ``weight_loader``: ``{"qkv_proj": {"q_proj": "q", "k_proj": "k", "v_proj": "v"}}``. Skip lists
    of quantization read the same table.
    """

    packed_modules_mapping: ClassVar[Mapping[str, Mapping[str, ShardId | None]]]


class HasPartsElsewhere(Protocol):
    """A module with whole parts on other ranks, such as the layers of another stage."""

    def parts_elsewhere(self) -> Collection[str]:
        """Return the names of these parts, relative to the module."""


# On Python 3.11, asking hundreds of modules for a protocol takes a tenth of a second.


def has_packed_modules(module: nn.Module) -> TypeGuard[HasPackedModules]:
    """Return True if a module has merged layers with a table."""
    return hasattr(module, "packed_modules_mapping")


def _has_parts_elsewhere(module: nn.Module) -> TypeGuard[HasPartsElsewhere]:
    return hasattr(module, "parts_elsewhere")


@dataclass(frozen=True)
class Target:
    """A parameter or buffer, or a part, that one tensor of a checkpoint fills.

    Attributes:
        name: the name in the model.
        tensor: the tensor to be filled.
        shard_id: the part of the tensor; ``None`` for the whole.
        source: the name of the part in the checkpoint, after the changes of the ``WeightsMapper``.
    """

    name: str
    tensor: torch.Tensor
    shard_id: ShardId | None
    source: str


class Targets:
    """The parameters and persistent buffers of a model, with their possible names in checkpoints.

    Attributes:
        tensors: name in the model → tensor.
        by_source: name in the checkpoint → target.
    """

    def __init__(self, model: nn.Module) -> None:
        # The parameters themselves: their attributes have the loaders.
        self.tensors: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
        self._tables: list[tuple[str, Mapping[str, Mapping[str, ShardId | None]]]] = []
        self._elsewhere: set[str] = set()
        for path, module in model.named_modules():
            prefix = f"{path}." if path else ""
            if has_packed_modules(module):
                self._tables.append((prefix, module.packed_modules_mapping))
            if _has_parts_elsewhere(module):
                self._elsewhere.update(prefix + part for part in module.parts_elsewhere())
        self.by_source: dict[str, Target] = {}
        for name in self.tensors:
            for target in self._targets_of(name):
                self.by_source[target.source] = target
        self._layers = {source.rpartition(".")[0] for source in self.by_source}

    def _targets_of(self, name: str) -> Iterator[Target]:
        """Yield the whole parameter or buffer, and the parts that a checkpoint may have instead."""
        tensor = self.tensors[name]
        yield Target(name, tensor, None, name)
        layer, _, last = name.rpartition(".")
        for part, shard in getattr(tensor, "checkpoint_parts", {}).items():
            yield Target(name, tensor, shard, _path(layer, part))
        outer, _, layer_name = layer.rpartition(".")
        for prefix, table in self._tables:
            if not name.startswith(prefix) or layer_name not in table:
                continue
            for part, shard_id in table[layer_name].items():
                yield Target(name, tensor, shard_id, _path(outer, part, last))

    def has_layer(self, layer: str) -> bool:
        """Return True if this rank takes tensors of the checkpoint's layer ``layer``."""
        return layer in self._layers

    def spelled(self, names: Sequence[str]) -> str | None:
        """Return the first name that the model has, on this rank or on others.

        Returns:
            Such a name; else the first of ``names``, or ``None`` if there are no names.
        """
        for name in names:
            if name in self.by_source or self.is_elsewhere(name):
                return name
        return names[0] if names else None

    def is_elsewhere(self, name: str) -> bool:
        """Return True if a tensor of that name is for other ranks."""
        # Most models have no parts elsewhere, and checkpoints have many thousands of names.
        if not self._elsewhere:
            return False
        path, _, _ = name.rpartition(".")
        while path:
            if path in self._elsewhere:
                return True
            path = path.rpartition(".")[0]
        return False

    def missing(self, found: Sequence[Target]) -> list[str]:
        """Return the checkpoint's names of the tensors and parts that ``found`` leaves unfilled.

        A merged tensor is missing by its parts. Two names of one tensor are one name in the list.
        """
        whole = {id(target.tensor) for target in found if target.shard_id is None}
        parts = {(id(target.tensor), target.shard_id) for target in found}
        started = {tensor for tensor, _ in parts}
        merged = set()
        for target in self.by_source.values():
            if target.shard_id is not None:
                merged.add(id(target.tensor))
        missing: dict[tuple[int, ShardId | None], str] = {}
        for source, target in self.by_source.items():
            tensor = id(target.tensor)
            part = (tensor, target.shard_id)
            if tensor in whole or part in parts:
                continue
            # A merged tensor has a name as a whole, too. Users know the names of the parts.
            is_part = target.shard_id is not None
            if is_part == (tensor in merged):
                remark = " (a part)" if tensor in started else ""
                missing.setdefault(part, source + remark)
        return list(missing.values())


def _path(*names: str) -> str:
    """Join names with dots, without the empty names of the whole model."""
    return ".".join(name for name in names if name)


def is_ignored(name: str, patterns: Sequence[str]) -> bool:
    """Return True if a name matches one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
