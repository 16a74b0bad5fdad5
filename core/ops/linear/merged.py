"""Column-parallel layers that stand for several, whose weights they hold one after another."""

from __future__ import annotations

from typing import Any

import torch
from opgraft.distributed import (
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from opgraft.errors import LayerError, WeightError
from opgraft.ops.linear.parallel import ColumnParallelLinear
from opgraft.ops.linear.quantization_config import QuantizationConfig
from opgraft.ops.linear.sharding import OutputShard, divide
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
        self, param: Any, loaded_weight: LoadedTensor, loaded_shard_id: int | tuple[int, ...] | None = None
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
            raise WeightError(f"{self.name}: there is no layer {loaded_shard_id!r} among its {len(shards)}")
        self._load(param, loaded_weight, [shards[index] for index in wanted])

    def _gathered(self, output: Tensor) -> Tensor:
        parts = torch.split(output, self.output_partition_sizes, dim=-1)
        return torch.cat([tensor_model_parallel_all_gather(part) for part in parts], dim=-1)


class QKVParallelLinear(ColumnParallelLinear):
    """The query, key and value projections of attention; a rank has whole heads of each.

    With fewer key heads than ranks, a key head and its value head are on several ranks, next to one another.

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
        num_kv_head_replicas: ranks that have the same key head.

    Raises:
        LayerError: ranks do not divide the query heads; or neither key heads by ranks, nor ranks by key heads divide;
            or there are no key heads.
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
        self.hidden_size = hidden_size
        self.head_size = head_size
        self.v_head_size = head_size if v_head_size is None else v_head_size
        self.total_num_heads = total_num_heads
        self.total_num_kv_heads = total_num_heads if total_num_kv_heads is None else total_num_kv_heads
        self.num_heads = divide(total_num_heads, ranks, f"QKVParallelLinear {prefix!r}: the number of heads")
        self.num_kv_heads, self.num_kv_head_replicas = _key_heads(self.total_num_kv_heads, ranks, prefix)
        heads = (self.num_heads * head_size, self.num_kv_heads * head_size, self.num_kv_heads * self.v_head_size)
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
        kv_rank = self.tp_rank // self.num_kv_head_replicas
        shards, offset = [], 0
        for index, size in enumerate(self.output_partition_sizes):
            start = (self.tp_rank if index == 0 else kv_rank) * size
            shards.append(OutputShard(index, offset, start, size, totals[index]))
            offset += size
        return shards

    def weight_loader(self, param: Any, loaded_weight: LoadedTensor, loaded_shard_id: str | None = None) -> None:
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
                raise WeightError(f"{self.name}: there is no projection {loaded_shard_id!r}, but {self.SHARDS}")
            shards = [shards[self.SHARDS.index(loaded_shard_id)]]
        self._load(param, loaded_weight, shards)


def _key_heads(total: int, ranks: int, prefix: str) -> tuple[int, int]:
    """Return the key heads of a rank, and how many ranks have each."""
    if total < 1:
        raise LayerError(f"QKVParallelLinear {prefix!r}: the number of key heads is {total}, expected at least 1")
    if total >= ranks:
        return divide(total, ranks, f"QKVParallelLinear {prefix!r}: the number of key heads"), 1
    if ranks % total:
        raise LayerError(
            f"QKVParallelLinear {prefix!r}: {ranks} tensor-parallel ranks cannot share {total} key heads: choose a "
            "number of ranks that divides them, or that they divide"
        )
    return 1, ranks // total
