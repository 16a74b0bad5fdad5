"""Linear layers for tensor-parallel ranks (Shoeybi et al., arXiv:1909.08053, section 3)."""

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
from opgraft.ops.weights import LoadedTensor, only_copies, set_weight_attrs
from torch import Tensor, nn

__all__ = ["ColumnParallelLinear", "LinearBase", "ReplicatedLinear", "RowParallelLinear"]

Output = Tensor | tuple[Tensor, nn.Parameter | None]
"""The result and a bias that was not added; without ``return_bias`` the result only."""


class LinearBase(PackableLayer, PluggableLayer):
    """The base of the parallel linear layers: sizes, and the weight method.

    Attributes:
        input_size: of all ranks.
        output_size: of all ranks.
        quant_method: holds the weight.
        tp_rank: position of this process among the ranks that share the layer.
        tp_size: number of those ranks.
        prefix: the layer's name in the checkpoint.
        weight_loader: method of each layer; loads this rank's part of ``loaded_weight`` into
            ``param``.
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
        """Let the weight method change the weights to the layout of its kernel."""
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
        set_weight_attrs(bias, {"weight_loader": self.weight_loader})
        if cut:
            set_weight_attrs(bias, {"output_dim": 0})
        self.bias = bias

    def _apply_method(self, x: Tensor, bias: nn.Parameter | None) -> Tensor:
        return self.quant_method.apply(self, x, bias)

    def _returned(self, output: Tensor) -> Output:
        if not self.return_bias:
            return output
        return output, self.bias if self.skip_bias_add else None

    def extra_repr(self) -> str:
        method = type(self.quant_method).__name__
        has_bias = self.bias is not None
        sizes = f"{self.input_size}, {self.output_size}"
        return f"{sizes}, bias={has_bias}, tp={self.tp_size}, {method}"


@CustomOp.register("replicated_linear")
class ReplicatedLinear(LinearBase):
    """``x · weightᵀ + bias``, whole on every rank.

    Shapes:
        ``[..., input_size]`` to ``[..., output_size]``.

    Args:
        input_size: elements of the last dimension of the input.
        output_size: elements of the last dimension of the result.
        bias: add a bias.
        skip_bias_add: return the bias instead of adding the bias, for a later kernel.
        params_dtype: the dtype of plain parameters; torch's default dtype if not given.
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

    @only_copies
    def weight_loader(self, param: Any, loaded_weight: LoadedTensor) -> None:
        """Load a whole weight.

        Raises:
            WeightError: ``loaded_weight`` has another shape.
        """
        expect_rows(param, loaded_weight, self.output_size, self.name)
        shard = OutputShard(0, 0, 0, self.output_size, self.output_size)
        load_rows(param, loaded_weight, shard, self.name)

    def forward(self, x: Tensor) -> Output:
        bias = None if self.skip_bias_add else self.bias
        return self._returned(self._apply_method(x, bias))


@CustomOp.register("column_parallel_linear")
class ColumnParallelLinear(LinearBase):
    """``x · weightᵀ + bias``. A rank computes a part of the outputs.

    Shapes:
        ``[..., input_size]`` to ``[..., output_size_per_partition]``, or ``[..., output_size]`` if
        gathered.

    Args:
        input_size: elements of the last dimension of the input.
        output_size: of all ranks.
        bias: add a bias, cut like the output.
        gather_output: gather the parts of all ranks.
        skip_bias_add: return the bias instead of adding the bias.
        params_dtype: the dtype of plain parameters; torch's default dtype if not given.
        quant_config: chooses the weight method.
        prefix: the layer's name in the checkpoint.
        return_bias: return ``(result, bias or None)``; else the result only.
        disable_tp: keep the layer whole on every rank.
        tp_rank: the part to hold; the rank of this process if not given.
        tp_size: the number of parts; the number of ranks if not given.

    Raises:
        LayerError: the ranks do not divide the output.
    """

    output_sizes: Sequence[int] | None = None
    """The output sizes of all ranks, one for each layer in a merged layer."""

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
        what = f"{self.name}: the output size"

        # A merged layer has set its sizes before this constructor.
        sizes = self.output_sizes or [output_size]
        self.input_size_per_partition = input_size
        self.output_partition_sizes = [divide(size, self.tp_size, what) for size in sizes]
        self.output_size_per_partition = sum(self.output_partition_sizes)

        self._create_weights(input_size, self.output_partition_sizes)
        self._create_bias(bias, self.output_size_per_partition, cut=True)

    def output_shards(self) -> list[OutputShard]:
        """Return this rank's rows, one entry for each layer in a merged layer."""
        shards = []
        offset = 0
        for index, size in enumerate(self.output_partition_sizes):
            start = self.tp_rank * size
            total = self.tp_size * size
            shards.append(OutputShard(index, offset, start, size, total))
            offset += size
        return shards

    @only_copies
    def weight_loader(self, param: Any, loaded_weight: LoadedTensor) -> None:
        """Load this rank's rows of a weight.

        Raises:
            WeightError: ``loaded_weight`` has another shape.
        """
        self._load(param, loaded_weight, self.output_shards())

    def _load(self, param: Any, loaded: LoadedTensor, shards: Sequence[OutputShard]) -> None:
        """Load rows of several layers. ``loaded`` has the layers one after another."""
        total = sum(shard.total for shard in shards)
        expect_rows(param, loaded, total, self.name)
        on_disk = 0
        for shard in shards:
            load_rows(param, loaded, shard, self.name, on_disk)
            on_disk += shard.total

    def forward(self, input_: Tensor) -> Output:
        bias = None if self.skip_bias_add else self.bias
        output = self._apply_method(input_, bias)
        if self.gather_output and self.tp_size > 1:
            output = self._gathered(output)
        return self._returned(output)

    def _gathered(self, output: Tensor) -> Tensor:
        return tensor_model_parallel_all_gather(output)


@CustomOp.register("row_parallel_linear")
class RowParallelLinear(LinearBase):
    """``x · weightᵀ + bias``. A rank reads a part of the inputs, and the ranks sum their results.

    Shapes:
        ``[..., input_size_per_partition]``, or ``[..., input_size]`` without
        ``input_is_parallel``, to ``[..., output_size]``.

    Args:
        input_size: of all ranks.
        output_size: elements of the last dimension of the result.
        bias: add a bias, on the first rank.
        input_is_parallel: the input is cut already.
        skip_bias_add: return the bias instead of adding the bias.
        params_dtype: the dtype of plain parameters; torch's default dtype if not given.
        reduce_results: sum the results of the ranks.
        quant_config: chooses the weight method.
        prefix: the layer's name in the checkpoint.
        return_bias: return ``(result, bias or None)``; else the result only.
        disable_tp: keep the layer whole on every rank.
        shard: the inputs of this rank; an equal part if not given.

    Raises:
        LayerError: the ranks do not divide the input, or a bias would be added without a sum over
            the ranks.
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
                f"{self.name}: reduce_results=False with a bias that is added: whoever adds up the "
                "results of the ranks would count it wrongly. Pass bias=False or "
                "skip_bias_add=True"
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

    @only_copies
    def weight_loader(self, param: Any, loaded_weight: LoadedTensor) -> None:
        """Load this rank's columns of a weight.

        Raises:
            WeightError: ``loaded_weight`` has another shape.
        """
        load_columns(param, loaded_weight, self.shard, self.name)

    def forward(self, input_: Tensor) -> Output:
        if self.tp_size > 1 and not self.input_is_parallel:
            input_ = input_.narrow(-1, self.shard.start, self.shard.size).contiguous()
        # The sum over the ranks must count the bias once.
        adds_bias = self.tp_rank == 0 and not self.skip_bias_add
        output = self._apply_method(input_, self.bias if adds_bias else None)
        if self.reduce_results and self.tp_size > 1:
            output = tensor_model_parallel_all_reduce(output)
        return self._returned(output)
