"""Column-parallel layers that stand for several, whose weights they hold one after another."""

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
from opgraft.ops.weights import LoadedTensor
from torch import Tensor


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several column-parallel layers of one input, such as gate and up; a rank has a part of each.

    Shapes:
        ``[..., input_size]`` to ``[..., sum(output_sizes) / tp_size]``: the rank's part of each, one after another.

    Args:
        input_size: elements of the last dimension of the input.
        output_sizes: of all ranks, one for each layer.
        bias: whether there is one.
        gather_output: put the parts of all ranks together, each layer's outputs side by side.
        skip_bias_add: return the bias in place of adding it.
        params_dtype: of what is not quantized; torch's default dtype if not given.
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

    def weight_loader(
        self,
        param: Any,
        loaded_weight: LoadedTensor,
        loaded_shard_id: int | tuple[int, ...] | None = None,
    ) -> None:
        """Load this rank's rows of the weight of one layer, of several that lie one after another, or of all.

        Args:
            param: the parameter.
            loaded_weight: of the layers that ``loaded_shard_id`` says, whole.
            loaded_shard_id: the position of a layer among ``output_sizes``, or several, in order; ``None`` for all.

        Raises:
            WeightError: it has another shape, or there is no such layer.
        """
        shards = self.output_shards()
        ids = range(len(shards)) if loaded_shard_id is None else loaded_shard_id
        wanted = (ids,) if isinstance(ids, int) else tuple(ids)
        if not all(isinstance(index, int) and 0 <= index < len(shards) for index in wanted):
            raise WeightError(
                f"{self.name}: there is no layer {loaded_shard_id!r} among its {len(shards)}"
            )
        self._load(param, loaded_weight, [shards[index] for index in wanted])

    def _gathered(self, output: Tensor) -> Tensor:
        parts = torch.split(output, self.output_partition_sizes, dim=-1)
        return torch.cat([tensor_model_parallel_all_gather(part) for part in parts], dim=-1)


class QKVParallelLinear(ColumnParallelLinear):
    """The query, key and value projections of attention; a rank has whole heads of each.

    With fewer key heads than ranks, a key head and its value head are on several ranks, next to one another. Key heads
    that the ranks do not divide are shared out as evenly as they can be, each with its query heads: the first ranks
    have one more.

    Shapes:
        ``[..., hidden_size]`` to ``[..., num_heads · head_size + num_kv_heads · (head_size + v_head_size)]``.

    Args:
        hidden_size: elements of the last dimension of the input.
        head_size: elements of a query or key head.
        total_num_heads: query heads of all ranks.
        total_num_kv_heads: key heads of all ranks; as many as query heads if not given.
        bias: whether there is one.
        skip_bias_add: return the bias in place of adding it.
        params_dtype: of what is not quantized; torch's default dtype if not given.
        quant_config: chooses the weight method.
        prefix: the layer's name in the checkpoint.
        return_bias: return ``(result, bias or None)``; else the result only.
        disable_tp: keep the layer whole on every rank.
        v_head_size: elements of a value head; those of a key head if not given.

    Attributes:
        num_heads: query heads of this rank.
        num_kv_heads: key heads of this rank.
        first_head: the number of its first query head.
        first_kv_head: the number of its first key head.
        num_kv_head_replicas: ranks that have the same key head.

    Raises:
        LayerError: key heads do not divide the query heads; or there are fewer of them than ranks, which they do not
            divide; or there are none.
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
        ranks, rank = (
            (1, 0)
            if disable_tp
            else (get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank())
        )
        self.hidden_size = hidden_size
        self.head_size = head_size
        self.v_head_size = head_size if v_head_size is None else v_head_size
        self.total_num_heads = total_num_heads
        self.total_num_kv_heads = (
            total_num_heads if total_num_kv_heads is None else total_num_kv_heads
        )
        shared = _Heads.of_rank(
            total_num_heads, self.total_num_kv_heads, rank, ranks, f"QKVParallelLinear {prefix!r}"
        )
        self.first_head, self.num_heads = shared.first, shared.count
        self.first_kv_head, self.num_kv_heads = shared.first_key, shared.keys
        self.num_kv_head_replicas = shared.replicas
        heads = (
            self.num_heads * head_size,
            self.num_kv_heads * head_size,
            self.num_kv_heads * self.v_head_size,
        )
        self.output_sizes = [size * ranks for size in heads]
        super().__init__(
            hidden_size,
            sum(self.output_sizes),
            bias,
            False,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
            return_bias=return_bias,
            disable_tp=disable_tp,
        )

    def output_shards(self) -> list[OutputShard]:
        """List this rank's rows of query, key and value; those of a key head are the same on its replicas."""
        totals = (
            self.total_num_heads * self.head_size,
            self.total_num_kv_heads * self.head_size,
            self.total_num_kv_heads * self.v_head_size,
        )
        kv_start = self.first_kv_head
        starts = (
            self.first_head * self.head_size,
            kv_start * self.head_size,
            kv_start * self.v_head_size,
        )
        shards, offset = [], 0
        for index, (size, start, total) in enumerate(
            zip(self.output_partition_sizes, starts, totals, strict=True)
        ):
            shards.append(OutputShard(index, offset, start, size, total))
            offset += size
        return shards

    def uneven_output(self) -> InputShard | None:
        """Return which values of all heads this rank computes; ``None`` where all ranks compute equally many."""
        if self.total_num_heads == self.num_heads * self.tp_size:
            return None
        size = self.v_head_size
        return InputShard(
            self.first_head * size, self.num_heads * size, self.total_num_heads * size
        )

    def weight_loader(
        self, param: Any, loaded_weight: LoadedTensor, loaded_shard_id: str | None = None
    ) -> None:
        """Load this rank's rows of one projection, or of all three.

        Args:
            param: the parameter.
            loaded_weight: whole.
            loaded_shard_id: ``"q"``, ``"k"`` or ``"v"``; ``None`` where the weight has all three.

        Raises:
            WeightError: it has another shape, or there is no such projection.
        """
        shards = self.output_shards()
        if loaded_shard_id is not None:
            if loaded_shard_id not in self.SHARDS:
                raise WeightError(
                    f"{self.name}: there is no projection {loaded_shard_id!r}, but {self.SHARDS}"
                )
            shards = [shards[self.SHARDS.index(loaded_shard_id)]]
        self._load(param, loaded_weight, shards)


@dataclass(frozen=True)
class _Heads:
    """The heads of a rank: the first, and how many; likewise of keys; and how many ranks have the same keys."""

    first: int
    count: int
    first_key: int
    keys: int
    replicas: int

    @classmethod
    def of_rank(cls, total: int, keys: int, rank: int, ranks: int, what: str) -> _Heads:
        """Share heads out.

        Raises:
            LayerError: that cannot be.
        """
        if keys < 1:
            raise LayerError(f"{what}: the number of key heads is {keys}, expected at least 1")
        if keys < ranks and ranks % keys:
            raise LayerError(
                f"{what}: {ranks} tensor-parallel ranks cannot share {keys} key heads: choose a number of ranks that "
                "divides them, or that they divide, or a smaller one"
            )
        if keys < ranks or keys % ranks == 0:
            count, replicas = (
                divide(total, ranks, f"{what}: the number of heads"),
                max(1, ranks // keys),
            )
            return cls(rank * count, count, rank * keys // ranks, max(1, keys // ranks), replicas)
        if total % keys:
            raise LayerError(
                f"{what}: the number of heads is {total}, which {keys} key heads do not divide"
            )
        group = total // keys
        each, more = divmod(keys, ranks)
        first, count = rank * each + min(rank, more), each + (rank < more)
        return cls(first * group, count * group, first, count, 1)
