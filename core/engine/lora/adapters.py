"""``Adapters``: the adapters that a worker holds, and the layers that they add to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from opgraft.base.text import described
from opgraft.binding.custom_op import PluggableLayer
from opgraft.binding.reach import idle_children, reaches
from opgraft.config import OpgraftConfig
from opgraft.engine.lora.adapter_file import AdapterFile, Matrices, open_adapter
from opgraft.engine.lora.request import NO_LORA, LoRARequest
from opgraft.errors import CheckpointError, EngineError
from opgraft.models.names import ShardId, WeightsMapper, has_packed_modules
from opgraft.ops.attention.latent.layers import MLAAttention
from opgraft.ops.embedding import LogitsProcessor, ParallelLMHead, VocabParallelEmbedding
from opgraft.ops.linear.lora import LoRA
from opgraft.ops.linear.lora.method import LoRAMethod, adapting
from opgraft.ops.linear.parallel import LinearBase
from opgraft.ops.weights import LoadedTensor, set_weight_attrs
from torch import Tensor, nn


@dataclass(frozen=True)
class LoRAReport:
    """The outcome of ``Adapters.add`` on one rank.

    Attributes:
        error: the reason why the adapter cannot be used; empty without one.
        digest: of the adapter's files.
        elsewhere: modules of the adapter without a layer on this rank.
    """

    error: str = ""
    digest: str = ""
    elsewhere: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Target:
    """A layer, or a part of a merged layer, under one name in the checkpoint.

    Attributes:
        path: the layer's path in the model.
        layer: the layer.
        shard: the part; ``None`` for the whole layer.
    """

    path: str
    layer: Any
    shard: ShardId | None

    @property
    def embeds(self) -> bool:
        """True for an embedding, which looks ids up."""
        return isinstance(self.layer, VocabParallelEmbedding) and self.layer.looks_up

    @property
    def sizes(self) -> Sequence[int]:
        """The outputs of each part of the layer, on this rank."""
        return [self.layer.embedding_dim] if self.embeds else self.layer.output_partition_sizes

    @property
    def inputs(self) -> int:
        """The inputs of the layer on this rank; for an embedding, the ids."""
        if self.embeds:
            return int(self.layer.num_embeddings_per_partition)
        return int(self.layer.input_size_per_partition)

    @property
    def parts(self) -> Sequence[int]:
        """The positions of the parts in the layer."""
        if self.shard is None:
            return range(len(self.sizes))
        if isinstance(self.shard, str):
            return [self.layer.SHARDS.index(self.shard)]
        return [int(self.shard)]  # type: ignore[arg-type]  # pairs are of experts

    def load(self, shape: tuple[int, ...], source: LoadedTensor, **cut: int) -> Tensor:
        """Return this rank's part of a matrix, by the loader of the layer, in float32.

        Args:
            shape: of the part.
            source: the matrix.
            cut: the dimensions to cut, see ``opgraft.ops.linear.sharding``.
        """
        part = torch.zeros(shape, dtype=torch.float32)
        set_weight_attrs(part, cut)
        shard = () if self.shard is None else (self.shard,)
        self.layer.weight_loader(part, source, *shard)
        return part


_Matrices = tuple[Tensor, Tensor]
"""The two matrices of one adapter for a layer, with as many rows and columns as its rank has."""


class Adapters:
    """The adapters of a worker. The layers have slots for ``lora.max_loras`` of them at once.

    Args:
        model: the model of the worker.
        opgraft_config: has the limits.
        device: of the model.

    Attributes:
        ops: the ops that add adapters, by the paths of their layers.
    """

    def __init__(self, model: Any, opgraft_config: OpgraftConfig, device: torch.device) -> None:
        self._limits = opgraft_config.lora
        self._device = device
        self._dtype: torch.dtype = model.dtype
        self._mapper: WeightsMapper = model.weights_mapper
        self._targets = _targets_of(model)
        self._layers = {target.path: target for target in self._targets.values()}
        # The matrices of each adapter, by the path of the layer.
        self._loaded: dict[int, Mapping[str, _Matrices]] = {}
        # The adapters in the slots, the least recently used first.
        self._slots: OrderedDict[int, int] = OrderedDict()
        # Those whose matrices are in their slots.
        self._filled: set[int] = set()
        self.ops: dict[str, LoRA] = {}
        self._methods: dict[str, LoRAMethod] = {}

    def add(self, request: LoRARequest) -> LoRAReport:
        """Read an adapter, and make room for it. Nothing is raised: all ranks must go on together.

        Layers get room now, since an error of a step would be an error of all its requests.
        """
        try:
            found = open_adapter(request.lora_path, self._limits.max_lora_rank)
            matrices, elsewhere = self._read(found)
            for path, pair in matrices.items():
                self._make_room(path, rank=pair[1].shape[1])
        except Exception as error:
            return LoRAReport(described(error))
        self._loaded[request.lora_int_id] = matrices
        return LoRAReport(digest=found.digest, elsewhere=frozenset(elsewhere))

    def remove(self, number: int) -> None:
        """Forget an adapter, if there is one of the number."""
        self._loaded.pop(number, None)
        self._slots.pop(number, None)
        self._filled.discard(number)
        if not self._loaded:
            self.ops.clear()
            self._methods.clear()

    def most_bytes(self) -> int:
        """Return the bytes of all slots, if adapters of the largest rank change every layer."""
        elements = 0
        for target in self._layers.values():
            elements += len(target.sizes) * target.inputs + sum(target.sizes)
        in_slots = self._limits.max_loras * self._limits.max_lora_rank
        return elements * in_slots * self._dtype.itemsize

    def give_slots(self, numbers: Sequence[int]) -> None:
        """Give each adapter of a step a slot, and put its matrices there.

        Slots depend on the earlier calls alone, not on the layers of this rank. So all stages of a
        pipeline give the same slots, and order the rows of a step in the same way.

        Raises:
            EngineError: the step has more adapters than there are slots.
        """
        wanted = set(numbers) - {NO_LORA}
        if len(wanted) > self._limits.max_loras:
            raise EngineError(
                f"a step has {len(wanted)} adapters, and lora.max_loras is "
                f"{self._limits.max_loras}: the scheduler has to keep to it"
            )
        for number in sorted(wanted):
            if number not in self._slots:
                self._slots[number] = self._free_slot(wanted)
            self._slots.move_to_end(number)
        for number in wanted - self._filled:
            for path, op in self.ops.items():
                _fill(op, self._slots[number], self._loaded[number].get(path))
            self._filled.add(number)

    def slots_of(self, numbers: Sequence[int]) -> list[int]:
        """Return the slot of each adapter of the present step, -1 for ``NO_LORA``."""
        return [-1 if number == NO_LORA else self._slots[number] for number in numbers]

    @contextmanager
    def applied(self, numbers: Sequence[int], rows: Sequence[int]) -> Iterator[None]:
        """Within the block, the layers of the model add the adapters.

        Args:
            numbers: the adapter of each sequence in the call, in the order of ``slots_of``.
            rows: of each sequence.
        """
        counts = [0] * (self._limits.max_loras + 1)
        for slot, count in zip(self.slots_of(numbers), rows, strict=True):
            counts[slot + 1] += count
        # Layers without an adapter of this call go on with their own methods.
        paths: set[str] = set()
        for number in set(numbers) - {NO_LORA}:
            paths.update(self._loaded[number])
        methods = [(vars(self._layers[path].layer), self._methods[path]) for path in paths]
        own = [layer["quant_method"] for layer, _ in methods]
        for layer, method in methods:
            layer["quant_method"] = method
        try:
            with adapting(list(accumulate(counts))):
                yield
        finally:
            # Between steps, layers are bound by their own methods, as without adapters.
            for (layer, _), former in zip(methods, own, strict=True):
                layer["quant_method"] = former

    def _free_slot(self, wanted: set[int]) -> int:
        """Return a free slot, or the slot of the adapter that was not wanted for longest."""
        free = set(range(self._limits.max_loras)) - set(self._slots.values())
        if free:
            return min(free)
        unused = next(each for each in self._slots if each not in wanted)
        self._filled.discard(unused)
        return self._slots.pop(unused)

    def _make_room(self, path: str, rank: int) -> None:
        """Make the op of a layer anew, unless its slots have room for a rank."""
        former = self.ops.get(path)
        if former is not None and former.b.shape[2] >= rank:
            return
        target = self._layers[path]
        op = LoRA(
            target.inputs,
            target.sizes,
            self._limits.max_loras,
            rank,
            device=self._device,
            dtype=self._dtype,
        )
        for number in self._filled:
            _fill(op, self._slots[number], self._loaded[number].get(path))
        self.ops[path] = op
        self._methods[path] = LoRAMethod(target.layer.quant_method, op, target.embeds)

    def _read(self, found: AdapterFile) -> tuple[dict[str, _Matrices], set[str]]:
        """Read this rank's part of an adapter. Return it, and the modules without a layer.

        Raises:
            CheckpointError: a value is not finite, or the base model has other weights.
            WeightError: a matrix has another shape than the layer.
        """
        parts: dict[str, list[tuple[_Target, Matrices]]] = {}
        elsewhere = set()
        for module, matrices in found.modules.items():
            target = self._target(module)
            if target is None or target.embeds != matrices.embeds:
                elsewhere.add(module)
            else:
                parts.setdefault(target.path, []).append((target, matrices))
        read = {path: self._matrices_of(given) for path, given in parts.items()}
        for path, pair in read.items():
            # A product with zero spoils the rows of others, too.
            if not all(bool(matrix.isfinite().all()) for matrix in pair):
                raise CheckpointError(
                    f"the adapter {found.path} has values for {path!r:.120} that are not finite, "
                    f"or too large for {self._dtype}: train or save it anew"
                )
        for module, copied in found.base_copies.items():
            target = self._target(module)
            if target is not None:
                _expect_equal(module, target, copied)
        return read, elsewhere

    def _matrices_of(self, parts: Sequence[tuple[_Target, Matrices]]) -> _Matrices:
        """Return the matrices of a layer. The largest rank of its parts is the rank of all."""
        rank = max(matrices.rank for _, matrices in parts)
        whole = parts[0][0]
        a = torch.zeros(len(whole.sizes) * rank, whole.inputs, dtype=self._dtype)
        b = torch.zeros(sum(whole.sizes), rank, dtype=self._dtype)
        for target, matrices in parts:
            _read_matrices(target, matrices, a, b)
        return a, b

    def _target(self, module: str) -> _Target | None:
        """Return the layer for a module of the base model."""
        # The mapper changes names of tensors.
        for name in self._mapper.spellings(f"{module}.weight"):
            target = self._targets.get(name.removesuffix(".weight"))
            if target is not None:
                return target
        return None


def _fill(op: LoRA, slot: int, matrices: _Matrices | None) -> None:
    """Copy the matrices of an adapter to a slot, whose rank may be larger; without any, zeros."""
    op.a[slot].zero_()
    op.b[slot].zero_()
    if matrices is None:
        return
    a, b = matrices
    rank = b.shape[1]
    inputs = a.shape[1]
    by_part = op.a[slot].view(len(op.sizes), -1, inputs)
    by_part[:, :rank] = a.view(len(op.sizes), rank, inputs)
    op.b[slot, :, :rank] = b


def _read_matrices(target: _Target, matrices: Matrices, a: Tensor, b: Tensor) -> None:
    """Read this rank's part of the matrices of a module into those of its layer."""
    rank = matrices.rank
    cut_inputs, cut_outputs = {"input_dim": 1}, {"output_dim": 0}
    if target.embeds:
        # The inputs of the product are the ids, which a loader of embeddings calls outputs.
        cut_inputs, cut_outputs = {"output_dim": 1}, {}
    narrow = target.load((rank, target.inputs), matrices.a, **cut_inputs)
    wide = target.load((sum(target.sizes), rank), matrices.b, **cut_outputs)
    room = b.shape[1]
    offsets = [0, *accumulate(target.sizes)]
    for part in target.parts:
        rows = slice(offsets[part], offsets[part + 1])
        a[part * room : part * room + rank] = narrow
        b[rows, :rank] = wide[rows] * matrices.scale


def _targets_of(model: nn.Module) -> dict[str, _Target]:
    """Return the layers that adapters can add to, by their names in the checkpoint."""
    tables = []
    for path, module in model.named_modules():
        if has_packed_modules(module):
            tables.append((f"{path}." if path else "", module.packed_modules_mapping))
    bypassed = _bypassed_in(model)
    targets = {}
    for path, layer in model.named_modules():
        if not isinstance(layer, LinearBase | VocabParallelEmbedding) or layer in bypassed:
            continue
        targets[path] = _Target(path, layer, None)
        outer, _, name = path.rpartition(".")
        for prefix, table in tables:
            if path.startswith(prefix) and name in table:
                for part, shard in table[name].items():
                    source = f"{outer}.{part}" if outer else part
                    targets[source] = _Target(path, layer, shard)
    return targets


def _bypassed_in(model: nn.Module) -> set[nn.Module]:
    """Return the layers without adapters: nobody calls their weight method."""
    bypassed: set[nn.Module] = set()
    for layer in model.modules():
        # Queries absorb this weight, so that the layer is not called.
        if isinstance(layer, MLAAttention):
            bypassed.add(layer.kv_b_proj)
        if not isinstance(layer, PluggableLayer) or not _is_replaced(layer):
            continue
        # A plugin's code may read the weights itself: its own, those of its children, or the head.
        for name in idle_children(layer):
            bypassed.update(layer.get_submodule(name).modules())
        if reaches(layer, "quant_method"):
            continue
        if isinstance(layer, LogitsProcessor):
            bypassed.update(each for each in model.modules() if _is_head(each))
        elif not _is_head(layer):
            bypassed.add(layer)
    return bypassed


def _is_replaced(layer: PluggableLayer) -> bool:
    return layer.op_class is not layer.binding.replacement.target


def _is_head(layer: nn.Module) -> bool:
    return isinstance(layer, ParallelLMHead)


def _expect_equal(module: str, target: _Target, copied: LoadedTensor) -> None:
    """Check that an adapter's copy of a weight of the base model is that weight.

    Raises:
        CheckpointError: the weights differ, or cannot be compared.
    """
    weight = getattr(target.layer, "weight", None)
    if isinstance(weight, Tensor) and weight.dim() == 2:
        shape = tuple(weight.shape)
        own = target.load(shape, copied, output_dim=0).to(weight.dtype)
        if torch.equal(own.to(weight.device), weight):
            return
    raise CheckpointError(
        f"the adapter has weights of its own for {module!r:.120}, beside matrices of LoRA: save it "
        "with save_embedding_layers=False if these are the base model's"
    )
