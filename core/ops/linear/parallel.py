"""Linear layers of which each tensor-parallel rank holds a part (Shoeybi et al., arXiv:1909.08053, section 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from opgraft.binding.custom_op import CustomOp, PluggableLayer
from opgraft.binding.functional import Functional
from opgraft.binding.reach import reaches
from opgraft.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from opgraft.errors import LayerError
from opgraft.ops.linear.methods import QuantizeMethodBase, UnquantizedLinearMethod, forms_of
from opgraft.ops.linear.packed import PackableLayer
from opgraft.ops.linear.quantization_config import QuantizationConfig, chosen_method
from opgraft.ops.linear.sharding import (
    InputShard,
    OutputShard,
    divide,
    expect_rows,
    load_columns,
    load_rows,
)
from opgraft.ops.prefixes import claim_prefix
from opgraft.ops.weights import LoadedTensor, set_weight_attrs
from torch import Tensor, nn

Output = Tensor | tuple[Tensor, nn.Parameter | None]
"""The result, and the bias where it was not added; without ``return_bias`` the result only."""


class LinearBase(PackableLayer, PluggableLayer):
    """Common ground of the parallel linear layers: sizes, and the weight method that holds and applies the weight.

    Attributes:
        input_size: of all ranks, as ``output_size``.
        quant_method: holds the weight.
        tp_rank: position of this process among the ranks that share the layer.
        tp_size: number of those ranks.
        prefix: the layer's name in the checkpoint.
        weight_loader: method of each layer; loads this rank's part of ``loaded_weight`` into ``param``.
    """

    bias: nn.Parameter | None
    quant_method: QuantizeMethodBase
    weight_loader: Callable[..., None]

    def __init__(
        self,
        input_size: int,
        output_size: int,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
    ) -> None:
        super().__init__()
        self.input_size = input_size
        self.output_size = output_size
        self.skip_bias_add = skip_bias_add
        self.params_dtype = params_dtype or torch.get_default_dtype()
        self.quant_config = quant_config
        self.prefix = prefix
        claim_prefix(prefix, self)
        self.return_bias = return_bias
        self.disable_tp = disable_tp
        self.tp_rank = 0 if disable_tp else get_tensor_model_parallel_rank()
        self.tp_size = 1 if disable_tp else get_tensor_model_parallel_world_size()
        chosen = chosen_method(self, quant_config, prefix)
        self.quant_method = UnquantizedLinearMethod() if chosen is None else chosen

    @property
    def name(self) -> str:
        """The layer as messages call it."""
        return f"{self.op_class.__qualname__} {self.prefix!r}"

    def forms(self) -> tuple[Functional[..., Tensor], ...]:
        return forms_of(self) if reaches(self, "quant_method") else ()

    def process_weights_after_loading(self) -> None:
        """Have the weight method bring the weights into the layout that it prefers."""
        self.quant_method.process_weights_after_loading(self)

    def _create_weights(self, inputs: int, outputs: Sequence[int]) -> None:
        self.quant_method.create_weights(
            self,
            inputs,
            list(outputs),
            self.input_size,
            self.output_size,
            params_dtype=self.params_dtype,
            weight_loader=self.weight_loader,
        )

    def _create_bias(self, wanted: bool, size: int, cut: bool) -> None:
        if not wanted:
            self.register_parameter("bias", None)
            return
        bias = nn.Parameter(torch.zeros(size, dtype=self.params_dtype), requires_grad=False)
        set_weight_attrs(
            bias, {"weight_loader": self.weight_loader, **({"output_dim": 0} if cut else {})}
        )
        self.bias = bias

    def _apply_method(self, x: Tensor, bias: nn.Parameter | None) -> Tensor:
        return self.quant_method.apply(self, x, bias)

    def _returned(self, output: Tensor) -> Output:
        if not self.return_bias:
            return output
        return output, self.bias if self.skip_bias_add else None

    def extra_repr(self) -> str:
        method = type(self.quant_method).__name__
        return f"{self.input_size}, {self.output_size}, bias={self.bias is not None}, tp={self.tp_size}, {method}"


@CustomOp.register("replicated_linear")
class ReplicatedLinear(LinearBase):
    """``x · weightᵀ + bias``, whole on every rank.

    Shapes:
        ``[..., input_size]`` to ``[..., output_size]``.

    Args:
        input_size: elements of the last dimension of the input.
        output_size: elements of the last dimension of the result.
        bias: whether there is one.
        skip_bias_add: return the bias in place of adding it, for a kernel that does both later.
        params_dtype: of what is not quantized; torch's default dtype if not given.
        quant_config: chooses the weight method.
        prefix: the layer's name in the checkpoint.
        return_bias: return ``(result, bias or None)``; else the result only.
        disable_tp: has no effect here.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
            return_bias=return_bias,
            disable_tp=disable_tp,
        )
        self.input_size_per_partition = input_size
        self.output_size_per_partition = output_size
        self.output_partition_sizes = [output_size]
        self._create_weights(input_size, [output_size])
        self._create_bias(bias, output_size, cut=True)

    def weight_loader(self, param: Any, loaded_weight: LoadedTensor) -> None:
        """Load a whole weight.

        Raises:
            WeightError: it has another shape.
        """
        expect_rows(param, loaded_weight, self.output_size, self.name)
        shard = OutputShard(0, 0, 0, self.output_size, self.output_size)
        load_rows(param, loaded_weight, shard, self.name)

    def forward(self, x: Tensor) -> Output:
        return self._returned(self._apply_method(x, None if self.skip_bias_add else self.bias))


@CustomOp.register("column_parallel_linear")
class ColumnParallelLinear(LinearBase):
    """``x · weightᵀ + bias``, of which a rank has a part of the outputs.

    Shapes:
        ``[..., input_size]`` to ``[..., output_size_per_partition]``, or ``[..., output_size]`` if gathered.

    Args:
        input_size: elements of the last dimension of the input.
        output_size: of all ranks.
        bias: whether there is one; it is cut like the output.
        gather_output: put the parts of all ranks together.
        skip_bias_add: return the bias in place of adding it.
        params_dtype: of what is not quantized; torch's default dtype if not given.
        quant_config: chooses the weight method.
        prefix: the layer's name in the checkpoint.
        return_bias: return ``(result, bias or None)``; else the result only.
        disable_tp: keep the layer whole on every rank.
        tp_rank: which part to hold, if not that of this rank.
        tp_size: of how many parts.

    Raises:
        LayerError: the ranks do not divide the output.
    """

    output_sizes: Sequence[int] | None = None
    """Of all ranks, one for each layer that a merged layer stands for."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
        tp_rank: int | None = None,
        tp_size: int | None = None,
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
            return_bias=return_bias,
            disable_tp=disable_tp,
        )
        self.tp_rank = self.tp_rank if tp_rank is None else tp_rank
        self.tp_size = self.tp_size if tp_size is None else tp_size
        self.gather_output = gather_output
        sizes = self.output_sizes or [output_size]
        self.input_size_per_partition = input_size
        self.output_partition_sizes = [
            divide(size, self.tp_size, f"{self.name}: the output size") for size in sizes
        ]
        self.output_size_per_partition = sum(self.output_partition_sizes)
        self._create_weights(input_size, self.output_partition_sizes)
        self._create_bias(bias, self.output_size_per_partition, cut=True)

    def output_shards(self) -> list[OutputShard]:
        """List the rows that this rank has, one entry for each layer that this one stands for."""
        shards, offset = [], 0
        for index, size in enumerate(self.output_partition_sizes):
            shards.append(
                OutputShard(index, offset, self.tp_rank * size, size, size * self.tp_size)
            )
            offset += size
        return shards

    def weight_loader(self, param: Any, loaded_weight: LoadedTensor) -> None:
        """Load this rank's rows of a weight.

        Raises:
            WeightError: it has another shape.
        """
        self._load(param, loaded_weight, self.output_shards())

    def _load(self, param: Any, loaded: LoadedTensor, shards: Sequence[OutputShard]) -> None:
        """Load the rows of consecutive layers, which lie one after another in the weight."""
        expect_rows(param, loaded, sum(shard.total for shard in shards), self.name)
        on_disk = 0
        for shard in shards:
            load_rows(param, loaded, shard, self.name, on_disk)
            on_disk += shard.total

    def forward(self, input_: Tensor) -> Output:
        output = self._apply_method(input_, None if self.skip_bias_add else self.bias)
        return self._returned(
            self._gathered(output) if self.gather_output and self.tp_size > 1 else output
        )

    def _gathered(self, output: Tensor) -> Tensor:
        return tensor_model_parallel_all_gather(output)


@CustomOp.register("row_parallel_linear")
class RowParallelLinear(LinearBase):
    """``x · weightᵀ + bias``, of which a rank has a part of the inputs; the ranks add what they have.

    Shapes:
        ``[..., input_size_per_partition]``, or ``[..., input_size]`` without ``input_is_parallel``, to
        ``[..., output_size]``.

    Args:
        input_size: of all ranks.
        output_size: elements of the last dimension of the result.
        bias: whether there is one; the first rank adds it.
        input_is_parallel: the input is cut already.
        skip_bias_add: return the bias in place of adding it.
        params_dtype: of what is not quantized; torch's default dtype if not given.
        reduce_results: add what the ranks have.
        quant_config: chooses the weight method.
        prefix: the layer's name in the checkpoint.
        return_bias: return ``(result, bias or None)``; else the result only.
        disable_tp: keep the layer whole on every rank.
        shard: the inputs of this rank, where ranks have different numbers of them.

    Raises:
        LayerError: the ranks do not divide the input, or a bias would be added to what is not reduced.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        reduce_results: bool = True,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
        shard: InputShard | None = None,
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
            return_bias=return_bias,
            disable_tp=disable_tp,
        )
        if not reduce_results and bias and not skip_bias_add:
            raise LayerError(
                f"{self.name}: reduce_results=False with a bias that is added: whoever adds up the results of the "
                "ranks would count it wrongly. Pass bias=False or skip_bias_add=True"
            )
        self.input_is_parallel = input_is_parallel
        self.reduce_results = reduce_results
        self.shard = self._equal_shard() if shard is None else shard
        self.input_size_per_partition = self.shard.size
        self.output_size_per_partition = output_size
        self.output_partition_sizes = [output_size]
        self._create_weights(self.input_size_per_partition, [output_size])
        self._create_bias(bias, output_size, cut=False)

    def _equal_shard(self) -> InputShard:
        size = divide(self.input_size, self.tp_size, f"{self.name}: the input size")
        return InputShard(self.tp_rank * size, size, self.input_size)

    def weight_loader(self, param: Any, loaded_weight: LoadedTensor) -> None:
        """Load this rank's columns of a weight.

        Raises:
            WeightError: it has another shape.
        """
        load_columns(param, loaded_weight, self.shard, self.name)

    def forward(self, input_: Tensor) -> Output:
        if self.tp_size > 1 and not self.input_is_parallel:
            input_ = input_.narrow(-1, self.shard.start, self.shard.size).contiguous()
        adds_bias = self.tp_rank == 0 and not self.skip_bias_add
        output = self._apply_method(input_, self.bias if adds_bias else None)
        if self.reduce_results and self.tp_size > 1:
            output = tensor_model_parallel_all_reduce(output)
        return self._returned(output)
