"""Column-parallel layers that merge several: the weight holds their weights one after another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from opgraft.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from opgraft.errors import LayerError, WeightError
from opgraft.ops.linear.parallel import ColumnParallelLinear
from opgraft.ops.linear.quantization_config import QuantizationConfig
from opgraft.ops.linear.sharding import InputShard, OutputShard, divide
from opgraft.ops.weights import LoadedTensor, only_copies
from torch import Tensor

__all__ = ["MergedColumnParallelLinear", "QKVParallelLinear"]


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several column-parallel layers of one input, such as gate and up.

    A rank holds a part of each layer.

    Shapes:
        ``[..., input_size]`` to ``[..., sum(output_sizes) / tp_size]``: the rank's part of each
        layer, one after another.

    Args:
        input_size: elements of the last dimension of the input.
        output_sizes: of all ranks, one for each layer.
        bias: add a bias.
        gather_output: gather the parts of all ranks, so that each layer's outputs are adjacent.
        skip_bias_add: return the bias instead of adding the bias.
        params_dtype: the dtype of plain parameters; torch's default dtype if not given.
        quant_config: chooses the weight method.
        prefix: the layer's name in the checkpoint.
        return_bias: return ``(result, bias or None)``; else the result only.
        disable_tp: keep the layer whole on every rank.

    Raises:
        LayerError: the ranks do not divide each of the sizes.
    """

    output_sizes: list[int]

    def __init__(
        self,
        input_size: int,
        output_sizes: list[int],
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
    ) -> None:
        # The base class divides these sizes by the ranks.
        self.output_sizes = list(output_sizes)
        super().__init__(
            input_size,
            sum(output_sizes),
            bias,
            gather_output,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
            return_bias=return_bias,
            disable_tp=disable_tp,
        )

    @only_copies
    def weight_loader(
        self,
        param: Any,
        loaded_weight: LoadedTensor,
        loaded_shard_id: int | tuple[int, ...] | None = None,
    ) -> None:
        """Load this rank's rows of one layer, of adjacent layers, or of all.

        Args:
            param: the parameter.
            loaded_weight: the whole weights of the layers ``loaded_shard_id``.
            loaded_shard_id: the position of a layer in ``output_sizes``, or several positions in
                order; ``None`` for all.

        Raises:
            WeightError: ``loaded_weight`` has another shape, or there is no such layer.
        """
        shards = self.output_shards()
        if loaded_shard_id is None:
            self._load(param, loaded_weight, shards)
            return

        wanted: tuple[Any, ...] = (loaded_shard_id,)
        if not isinstance(loaded_shard_id, int):
            wanted = tuple(loaded_shard_id)
        known = range(len(shards))
        if not all(isinstance(index, int) and index in known for index in wanted):
            raise WeightError(
                f"{self.name}: there is no layer {loaded_shard_id!r} among its {len(shards)}"
            )
        self._load(param, loaded_weight, [shards[index] for index in wanted])

    def _gathered(self, output: Tensor) -> Tensor:
        # One gather for each layer, else the parts of a rank would stay adjacent.
        parts = torch.split(output, self.output_partition_sizes, dim=-1)
        return torch.cat([tensor_model_parallel_all_gather(part) for part in parts], dim=-1)


class QKVParallelLinear(ColumnParallelLinear):
    """The query, key and value projections of attention. A rank holds whole heads of each.

    With fewer key heads than ranks, adjacent ranks hold the same key head and value head. If the
    ranks do not divide the key heads, the first ranks hold one more key head, each with its query
    heads.

    Shapes:
        ``[..., hidden_size]`` to
        ``[..., num_heads · head_size + num_kv_heads · (head_size + v_head_size)]``.

    Args:
        hidden_size: elements of the last dimension of the input.
        head_size: elements of a query or key head.
        total_num_heads: query heads of all ranks.
        total_num_kv_heads: key heads of all ranks; ``total_num_heads`` if not given.
        bias: add a bias.
        skip_bias_add: return the bias instead of adding the bias.
        params_dtype: the dtype of plain parameters; torch's default dtype if not given.
        quant_config: chooses the weight method.
        prefix: the layer's name in the checkpoint.
        return_bias: return ``(result, bias or None)``; else the result only.
        disable_tp: keep the layer whole on every rank.
        v_head_size: elements of a value head; ``head_size`` if not given.

    Attributes:
        num_heads: query heads of this rank.
        num_kv_heads: key heads of this rank.
        first_head: the number of the first query head of this rank.
        first_kv_head: the number of the first key head of this rank.
        num_kv_head_replicas: the number of ranks with the same key heads.

    Raises:
        LayerError: there are no key heads, the key heads do not divide the query heads, or fewer
            key heads than ranks do not divide the ranks.
    """

    output_sizes: list[int]
    SHARDS = ("q", "k", "v")

    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        total_num_heads: int,
        total_num_kv_heads: int | None = None,
        bias: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
        v_head_size: int | None = None,
    ) -> None:
        ranks = 1 if disable_tp else get_tensor_model_parallel_world_size()
        rank = 0 if disable_tp else get_tensor_model_parallel_rank()

        if v_head_size is None:
            v_head_size = head_size
        if total_num_kv_heads is None:
            total_num_kv_heads = total_num_heads

        self.hidden_size = hidden_size
        self.head_size = head_size
        self.v_head_size = v_head_size
        self.total_num_heads = total_num_heads
        self.total_num_kv_heads = total_num_kv_heads

        what = f"QKVParallelLinear {prefix!r}"
        heads = _heads_of_rank(total_num_heads, total_num_kv_heads, rank, ranks, what)

        self.first_head = heads.first
        self.num_heads = heads.count
        self.first_kv_head = heads.first_key
        self.num_kv_heads = heads.keys
        self.num_kv_head_replicas = heads.replicas

        # The base class divides by the ranks. With replicas the sum exceeds the heads of the model.
        self.output_sizes = [
            ranks * heads.count * head_size,
            ranks * heads.keys * head_size,
            ranks * heads.keys * v_head_size,
        ]
        super().__init__(
            hidden_size,
            sum(self.output_sizes),
            bias,
            gather_output=False,
            skip_bias_add=skip_bias_add,
            params_dtype=params_dtype,
            quant_config=quant_config,
            prefix=prefix,
            return_bias=return_bias,
            disable_tp=disable_tp,
        )

    def output_shards(self) -> list[OutputShard]:
        """Return this rank's rows of query, key and value. Replicas of a key head have the same."""
        # For each projection: elements of a head, the first head, and all heads.
        projections = (
            (self.head_size, self.first_head, self.total_num_heads),
            (self.head_size, self.first_kv_head, self.total_num_kv_heads),
            (self.v_head_size, self.first_kv_head, self.total_num_kv_heads),
        )
        shards = []
        offset = 0
        for index, (head, first, total) in enumerate(projections):
            size = self.output_partition_sizes[index]
            shards.append(OutputShard(index, offset, head * first, size, head * total))
            offset += size
        return shards

    def uneven_output(self) -> InputShard | None:
        """Return this rank's part of the values of all heads; ``None`` if all parts are equal."""
        if self.total_num_heads == self.num_heads * self.tp_size:
            return None

        head = self.v_head_size
        return InputShard(
            start=head * self.first_head,
            size=head * self.num_heads,
            total=head * self.total_num_heads,
        )

    @only_copies
    def weight_loader(
        self, param: Any, loaded_weight: LoadedTensor, loaded_shard_id: str | None = None
    ) -> None:
        """Load this rank's rows of one projection, or of all three.

        Args:
            param: the parameter.
            loaded_weight: the whole weight.
            loaded_shard_id: ``"q"``, ``"k"`` or ``"v"``; ``None`` for a weight with all three.

        Raises:
            WeightError: ``loaded_weight`` has another shape, or there is no such projection.
        """
        shards = self.output_shards()
        if loaded_shard_id is None:
            self._load(param, loaded_weight, shards)
            return
        if loaded_shard_id not in self.SHARDS:
            raise WeightError(
                f"{self.name}: there is no projection {loaded_shard_id!r}, but {self.SHARDS}"
            )
        self._load(param, loaded_weight, [shards[self.SHARDS.index(loaded_shard_id)]])


@dataclass(frozen=True)
class _RankHeads:
    """The heads of one rank.

    Attributes:
        first: the number of the first query head.
        count: query heads of the rank.
        first_key: the number of the first key head.
        keys: key heads of the rank.
        replicas: the number of ranks with the same key heads.
    """

    first: int
    count: int
    first_key: int
    keys: int
    replicas: int = 1


def _heads_of_rank(total: int, keys: int, rank: int, ranks: int, what: str) -> _RankHeads:
    """Return the heads of one rank.

    Args:
        total: query heads of all ranks.
        keys: key heads of all ranks.
        rank: the position of the rank.
        ranks: the number of ranks.
        what: the layer as messages call it.

    Raises:
        LayerError: the ranks cannot share the heads.
    """
    if keys < 1:
        raise LayerError(f"{what}: the number of key heads is {keys}, expected at least 1")
    if keys < ranks and ranks % keys:
        raise LayerError(
            f"{what}: {ranks} tensor-parallel ranks cannot share {keys} key heads: choose a number "
            "of ranks that divides them, or that they divide, or a smaller one"
        )
    if keys < ranks or keys % ranks == 0:
        count = divide(total, ranks, f"{what}: the number of heads")
        return _RankHeads(
            first=rank * count,
            count=count,
            first_key=rank * keys // ranks,
            keys=max(1, keys // ranks),
            replicas=max(1, ranks // keys),
        )
    if total % keys:
        raise LayerError(
            f"{what}: the number of heads is {total}, which {keys} key heads do not divide"
        )

    # A key head stays with its query heads; the first ranks have one more.
    queries_of_key = total // keys
    each, more = divmod(keys, ranks)
    first_key = rank * each + min(rank, more)
    keys_of_rank = each + 1 if rank < more else each
    return _RankHeads(
        first=first_key * queries_of_key,
        count=keys_of_rank * queries_of_key,
        first_key=first_key,
        keys=keys_of_rank,
    )
